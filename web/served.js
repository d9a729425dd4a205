// What /pipemesh/status says when the page opens. Null: the server has no such route, because PipeMesh failed to load
// (ComfyUI serves these files all the same). Empty: the server did not answer this once; PipeMesh may be there.
import { api } from "../../scripts/api.js";

export const served = await api
  .fetchApi("/pipemesh/status")
  .then((answer) => (answer.ok ? answer.json() : answer.status === 404 ? null : {}))
  .catch(() => ({}));
