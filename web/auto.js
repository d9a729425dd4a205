// Auto mode: its switch in ComfyUI's settings, and a badge on nodes that sampled on one GPU all the same.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { onQueue } from "./queue.js";
import { served } from "./served.js";
import { texts } from "./texts.js";

const BADGE = { text: "1 GPU", fgColor: "#fff", bgColor: "#a15c00" };
const NO_POOL = "no pool"; // on the badge where there is no GPU
const hasGpu = served?.devices?.some((one) => one.name !== "cpu") ?? true;
const badges = new WeakMap(); // node -> its badge
const MOST = 100; // prompts and notices that are remembered
const workflows = new Map(); // prompt -> the workflow that was open when it was queued
let lastPrompt; // that began to run
const noticed = new Map(); // prompt and node -> its notice, of workflows that may be open later

const activeWorkflow = () => app.extensionManager?.workflow?.activeWorkflow;

function remember(map, key, value) {
  map.delete(key);
  map.set(key, value);
  if (map.size > MOST) map.delete(map.keys().next().value);
}

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
  const shown = new Badge(hasGpu ? BADGE : { ...BADGE, text: NO_POOL });
  const badge = () => shown;
  node.badges = [...(node.badges ?? []), badge];
  badges.set(node, badge);
  node.setDirtyCanvas?.(true);
}

// A prompt that this page did not queue, as before a reload, is taken for one of the open workflow; so is one
// that runs before the server has answered with its id.
const workflowOf = (prompt) => workflows.get(prompt) ?? activeWorkflow();
const isOpen = (prompt) => workflowOf(prompt) === activeWorkflow();

function executing({ detail }) {
  const node = detail?.node ?? detail;
  const prompt = detail?.prompt_id ?? lastPrompt;
  for (const [key, notice] of noticed) {
    const same = workflowOf(notice.prompt) === workflowOf(prompt);
    if (same && String(notice.node) === String(node) && notice.prompt !== prompt) noticed.delete(key);
  }
  if (isOpen(prompt)) removeBadge(nodeOf(node));
}

// The badges of the workflow that is open now: its nodes are new ones.
function showBadges() {
  for (const notice of noticed.values()) if (isOpen(notice.prompt)) addBadge(nodeOf(notice.node));
}

// Says why a setting has no effect on this server, if so; `why` names what the status says of it. The frontend also
// calls this when it reads the settings.
const sayIfOverruled = (why) => async (value, before) => {
  if (before === undefined || value === before) return;
  try {
    const answer = await api.fetchApi("/pipemesh/status");
    if (!answer.ok) return;
    const unavailable = (await answer.json()).auto[why];
    if (!unavailable) return;
    const detail = (await texts())(unavailable.name, ...unavailable.values);
    app.extensionManager?.toast?.add({ severity: "warn", summary: "PipeMesh", detail, life: 15000 });
  } catch (error) {
    console.warn("PipeMesh: the status of auto mode could not be read.", error);
  }
};

const extension = {
  name: "PipeMesh.Auto",
  settings: [
    {
      id: "PipeMesh.Auto",
      category: ["PipeMesh", "Auto mode", "Auto"],
      name: "Use all GPUs for every workflow",
      tooltip:
        "Every sampler uses all GPUs, without a PipeMesh node in the workflow. A sampler that cannot use them runs on one GPU, and its node says why. " +
        "PipeMesh Pool and PipeMesh Parallelize in a workflow come first.",
      type: "boolean",
      defaultValue: false,
      onChange: sayIfOverruled("unavailable"),
    },
    {
      id: "PipeMesh.Queue",
      category: ["PipeMesh", "Auto mode", "Queue"],
      name: "Queued prompts that differ in the seed",
      tooltip:
        "all soonest: queued prompts that differ only in the seed run at the same time, each on its own GPUs, if the whole queue ends sooner. " +
        "Each image is the one you would get alone. first image soonest: one prompt after the other, each on all GPUs.",
      type: "combo",
      options: ["all soonest", "first image soonest"], // locales/LANGUAGE/settings.json translates them
      defaultValue: "all soonest",
      onChange: sayIfOverruled("queue_unavailable"),
    },
  ],
  setup() {
    // Not in afterConfigureGraph: the workflow before is still the active one there.
    const opened = ({ name, after }) => name === "openWorkflow" && after(showBadges);
    app.extensionManager?.workflow?.$onAction?.(opened, true);
    onQueue((answer) => {
      const workflow = activeWorkflow();
      const known = (prompt) => prompt?.prompt_id && remember(workflows, prompt.prompt_id, workflow);
      answer.then(known, () => {}); // a refusal is the page's to show
    });
    api.addEventListener("execution_start", ({ detail }) => (lastPrompt = detail?.prompt_id));
    api.addEventListener("executing", executing);
    api.addEventListener("pipemesh.notice", ({ detail }) => {
      if (!detail.one_gpu) return;
      remember(noticed, `${detail.prompt} ${detail.node}`, detail);
      if (isOpen(detail.prompt)) addBadge(nodeOf(detail.node));
    });
  },
};

if (served) app.registerExtension(extension);
