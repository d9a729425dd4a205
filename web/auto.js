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
    },
  ],
  setup() {
    api.addEventListener("executing", ({ detail }) => removeBadge(nodeOf(detail?.node ?? detail)));
    api.addEventListener("pipemesh.notice", ({ detail }) => addBadge(nodeOf(detail.node)));
  },
});
