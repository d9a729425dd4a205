// Auto mode: its switch in ComfyUI's settings, and a badge on nodes that sampled on one GPU all the same.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const BADGE = { text: "1 GPU", fgColor: "#fff", bgColor: "#a15c00" };
const badges = new WeakMap(); // node -> its badge

// "12:5" is node 5 in the subgraph that node 12 holds.
function nodeOf(id) {
  const path = String(id ?? "").split(":");
  let graph = app.rootGraph ?? app.graph;
  for (const part of path.slice(0, -1)) graph = graph?.getNodeById(Number(part))?.subgraph;
  return graph?.getNodeById(Number(path.at(-1)));
}

function removeBadge(node) {
  const badge = node && badges.get(node);
  if (!badge) return;
  node.badges = node.badges.filter((one) => one !== badge);
  badges.delete(node);
  node.setDirtyCanvas?.(true);
}

function addBadge(node) {
  const Badge = window.LGraphBadge;
  if (!node || !Badge) return;
  removeBadge(node);
  const shown = new Badge(BADGE);
  const badge = () => shown;
  node.badges = [...(node.badges ?? []), badge];
  badges.set(node, badge);
  node.setDirtyCanvas?.(true);
}

// Says why the setting has no effect on this server, if so. The frontend also calls this when it reads the settings.
async function sayIfOverruled(value, before) {
  if (before === undefined || value === before) return;
  try {
    const answer = await api.fetchApi("/pipemesh/status");
    if (!answer.ok) return;
    const { unavailable } = (await answer.json()).auto;
    const toast = { severity: "warn", summary: "PipeMesh", detail: unavailable, life: 15000 };
    if (unavailable) app.extensionManager?.toast?.add(toast);
  } catch (error) {
    console.warn("PipeMesh: the status of auto mode could not be read.", error);
  }
}

app.registerExtension({
  name: "PipeMesh.Auto",
  settings: [
    {
      id: "PipeMesh.Auto",
      category: ["PipeMesh", "Auto mode", "Auto"],
      name: "Use all GPUs for every workflow",
      tooltip:
        "Every sampler runs on all GPUs, without a node of PipeMesh in the workflow. What cannot runs on one GPU, and its node says why. " +
        "PipeMesh Pool and PipeMesh Parallelize in a workflow come first.",
      type: "boolean",
      defaultValue: false,
      onChange: sayIfOverruled,
    },
  ],
  setup() {
    api.addEventListener("executing", ({ detail }) => removeBadge(nodeOf(detail?.node ?? detail)));
    api.addEventListener("pipemesh.notice", ({ detail }) => addBadge(nodeOf(detail.node)));
  },
});
