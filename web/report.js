// Shows the text of PipeMesh Report on the node: ComfyUI itself does this for its own preview nodes only.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { ComfyWidgets } from "../../scripts/widgets.js";
import { make } from "./make.js";

const NODE = "PipeMeshReport";
const WIDGET = "text";
const EMPTY = "Run the workflow to see the report.";
const WIDTH = 420;
const TEXT_HEIGHT = 330; // all of a report on two ranks
const PROMPTS = 20; // of ComfyUI's history, that are looked through
const MARK = "data-pipemesh-report"; // on the text: Nodes 2.0 makes an element of its own, and binds options to it
const STYLE = `textarea[${MARK}] { font-family: monospace; white-space: pre-wrap; min-height: ${TEXT_HEIGHT}px; }`;

function addText(node) {
  const { widget } = ComfyWidgets.STRING(node, WIDGET, ["STRING", { multiline: true, placeholder: EMPTY }], app);
  widget.serialize = false; // in saved workflows
  widget.options.serialize = false; // in prompts
  widget.options.read_only = true;
  widget.options[MARK] = "";
  widget.options.getMinHeight = () => TEXT_HEIGHT;
  const area = widget.element;
  if (area) {
    area.readOnly = true;
    Object.assign(area.style, { fontFamily: "monospace", whiteSpace: "pre-wrap", overflow: "auto" });
  }
  node.setSize?.([Math.max(node.size[0], WIDTH), node.size[1]]);
  fit(node);
}

function fit(node) {
  const [width, height] = node.computeSize();
  node.setSize?.([Math.max(node.size[0], width), Math.max(node.size[1], height)]);
  node.setDirtyCanvas?.(true, true);
}

const textOf = (node) => node?.widgets?.find((one) => one.name === WIDGET);

function showText(node, output) {
  const widget = textOf(node);
  const text = output?.text;
  if (widget && text) widget.value = Array.isArray(text) ? text.join("\n") : text;
}

// Yields [id in prompts, node] of every report in a graph; "12:5" is node 5 in the subgraph that node 12 holds.
function* reports(graph, path = "") {
  for (const node of graph?.nodes ?? []) {
    const id = `${path}${node.id}`;
    if (node.comfyClass === NODE) yield [id, node];
    if (node.subgraph) yield* reports(node.subgraph, `${id}:`);
  }
}

const rootGraph = () => app.rootGraph ?? app.graph;

// The name by which the page keeps a node's outputs.
const locatorOf = (node) => (node.graph === rootGraph() ? String(node.id) : `${node.graph.id}:${node.id}`);

// The page keeps outputs until it is loaded anew; ComfyUI's history has them then.
async function recall() {
  const graph = rootGraph();
  const blank = () => [...reports(graph)].filter(([, node]) => textOf(node) && !textOf(node).value);
  if (!blank().length) return;
  const answer = await api.fetchApi(`/history?max_items=${PROMPTS}`);
  const ran = answer.ok ? Object.values(await answer.json()).reverse() : [];
  for (const [id, node] of blank()) {
    const last = ran.find(({ prompt, outputs }) => {
      const [, , nodes, extra] = prompt;
      return nodes[id]?.class_type === NODE && extra.extra_pnginfo?.workflow?.id === graph.id && outputs[id]?.text;
    });
    if (last) showText(node, last.outputs[id]);
  }
}

app.registerExtension({
  name: "PipeMesh.Report",
  setup() {
    document.head.append(make("style", { text: STYLE }));
  },
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (nodeData.name !== NODE) return;
    const created = nodeType.prototype.onNodeCreated;
    nodeType.prototype.onNodeCreated = function (...args) {
      created?.apply(this, args);
      addText(this);
    };
    const executed = nodeType.prototype.onExecuted;
    nodeType.prototype.onExecuted = function (output) {
      executed?.apply(this, [output]);
      showText(this, output);
    };
  },
  afterConfigureGraph() {
    recall().catch((error) => console.warn("PipeMesh: ComfyUI's history could not be read.", error));
  },
  // Outputs of an earlier run, when its workflow is opened again.
  onNodeOutputsUpdated(outputs) {
    for (const [id, node] of reports(rootGraph())) showText(node, outputs[locatorOf(node)] ?? outputs[id]);
  },
});
