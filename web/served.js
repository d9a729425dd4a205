// What /pipemesh/status says when the page opens; null where PipeMesh failed to load: ComfyUI serves these files all the same.
import { api } from "../../scripts/api.js";

export const served = await api
  .fetchApi("/pipemesh/status")
  .then((answer) => (answer.ok ? answer.json() : null))
  .catch(() => null);
