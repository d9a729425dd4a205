// PipeMesh Pool: shows the inputs that count for its layout, and folds the others away. Devices are chosen from a list of
// those that are there.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { make } from "./make.js";
import { onQueue } from "./queue.js";
import { texts } from "./texts.js";

const NODE = "PipeMeshPool";
const PARALLELIZE = "PipeMeshParallelize";
const TITLE_WIDTH = 240; // of Parallelize: its sockets alone leave no room for its title
const LAYOUT = "layout";
const AUTO = "auto";
const DEVICES = "devices";
const PICK = "pick"; // no input: it writes what devices say, and is in no workflow and no prompt
const QUALITY = "quality"; // of a layout that is not said by hand
const MISTAKE_MS = 20000; // that a mistake is seen
const STYLE = `
.pipemesh-mistake { position: fixed; top: 104px; left: 76px; z-index: 1100; max-width: min(400px, calc(100vw - 96px)); padding: 10px 14px;
  border: 1px solid var(--error-text); border-radius: 6px; background: var(--comfy-menu-bg); color: var(--fg-color); font-size: 14px;
  line-height: 1.4; }
.pipemesh-mistake strong { color: var(--error-text); }
.pipemesh-mistake p { margin: 4px 0 0; }
.pipemesh-mistake button { float: right; margin-left: 12px; border: 0; background: none; color: inherit; font: inherit; cursor: pointer; }`;
const ALWAYS = new Set([DEVICES, "weights", LAYOUT, "queue", PICK]);

const layoutOf = (node) => node.widgets?.find((one) => one.name === LAYOUT);

const named = (value) => {
  const names = String(value ?? "").split(",").map((name) => name.trim()).filter(Boolean);
  return names.length === 1 && names[0] === AUTO ? [] : names;
};

// The devices after one of them was pressed: it joins those that are named, or leaves them; none is auto.
function toggled(value, name) {
  const names = named(value);
  const rest = names.filter((one) => one !== name);
  return (rest.length < names.length ? rest : [...names, name]).join(",") || AUTO;
}

// Adds the list of devices, each by its name and memory; behind all inputs, for a workflow keeps values by their places.
async function addList(node) {
  const devices = node.widgets?.find((one) => one.name === DEVICES);
  if (!devices) return;
  const [t, answer] = await Promise.all([texts(), api.fetchApi("/pipemesh/status")]);
  if (!answer.ok) return;
  const here = (await answer.json()).devices;
  const entry = (one) => `${one.name} · ${one.title}, ${(one.total / 2 ** 30).toFixed(1)} GiB`;
  const choices = new Map([[t("all_devices"), AUTO], ...here.map((one) => [entry(one), one.name])]);
  const values = [t("device_list"), ...choices.keys()]; // what it shows is one of them, or Nodes 2.0 takes it for a mistake
  const pick = node.addWidget("combo", PICK, values[0], undefined, { values, serialize: false });
  pick.label = t("choose_devices");
  pick.serialize = false;
  pick.callback = (chosen) => {
    const name = choices.get(chosen);
    if (name === undefined) return;
    devices.value = name === AUTO ? AUTO : toggled(devices.value, name);
    devices.callback?.(devices.value);
    pick.value = values[0];
    node.setDirtyCanvas?.(true, true);
  };
  fold(node);
}

function fold(node) {
  const layout = layoutOf(node);
  if (!layout) return;
  for (const widget of node.widgets) {
    if (ALWAYS.has(widget.name)) continue;
    const counts = (layout.value === AUTO) === (widget.name === QUALITY);
    const hidden = !counts && !node.inputs?.some((one) => one.widget?.name === widget.name && one.link != null);
    widget.hidden = hidden;
    widget.options.hidden = hidden; // what Nodes 2.0 looks at
  }
  node.widgets = [...node.widgets]; // and what makes it look
  const width = node.size?.[0] ?? 0;
  node.setSize?.([width, node.computeSize([width, 0])[1]]);
  node.setDirtyCanvas?.(true, true);
}

// What the server says of one node, each sentence once: ComfyUI repeats it for every input that it depends on.
function eachOnce(errors) {
  const said = new Map();
  for (const error of errors) {
    const [, sentence] = /^\w+ - ([\s\S]+)$/.exec(error.details ?? "") ?? [];
    const key = sentence ?? `${error.type} ${error.details}`;
    if (!said.has(key)) said.set(key, { error, sentence });
  }
  return [...said.values()];
}

// Shows in a message what is wrong with a pool when it is queued; on the page it is behind an i.
function tell(nodes) {
  for (const node of Object.values(nodes ?? {})) {
    if (node.class_type !== NODE || !Array.isArray(node.errors)) continue;
    const said = eachOnce(node.errors);
    node.errors = said.map((one) => one.error);
    for (const { sentence } of said) if (sentence) showMistake(sentence);
  }
}

// At the upper left: at the upper right, where ComfyUI's messages are, it would cover the way to their details.
function showMistake(sentence) {
  document.querySelector(".pipemesh-mistake")?.remove();
  const close = make("button", { text: "×", onclick: () => shown.remove() });
  texts().then((t) => close.setAttribute("aria-label", t("close")));
  const said = [close, make("strong", { text: "PipeMesh Pool" }), make("p", { text: sentence })];
  const shown = make("div", { className: "pipemesh-mistake", role: "alert" }, ...said);
  document.body.append(shown);
  setTimeout(() => shown.remove(), MISTAKE_MS);
}

function widen(nodeType) {
  const computed = nodeType.prototype.computeSize;
  nodeType.prototype.computeSize = function (...args) {
    const size = computed.apply(this, args);
    size[0] = Math.max(size[0], TITLE_WIDTH);
    return size;
  };
}

app.registerExtension({
  name: "PipeMesh.Pool",
  setup() {
    document.head.append(make("style", { text: STYLE }));
    onQueue((answer) => answer.catch((error) => tell(error?.response?.node_errors)));
  },
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (nodeData.name === PARALLELIZE) widen(nodeType);
    if (nodeData.name !== NODE) return;
    const created = nodeType.prototype.onNodeCreated;
    nodeType.prototype.onNodeCreated = function (...args) {
      created?.apply(this, args);
      const layout = layoutOf(this);
      if (!layout) return;
      const changed = layout.callback;
      layout.callback = (...values) => {
        changed?.apply(layout, values);
        fold(this);
      };
      fold(this);
      addList(this).catch((error) => console.warn("PipeMesh: the devices could not be listed.", error));
    };
    const configured = nodeType.prototype.onConfigure;
    nodeType.prototype.onConfigure = function (...args) {
      configured?.apply(this, args);
      fold(this);
    };
  },
});
