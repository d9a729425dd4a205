// Shows the text of PipeMesh Report on the node: ComfyUI itself does this for its own preview nodes only.
import { app } from "../../scripts/app.js";
import { ComfyWidgets } from "../../scripts/widgets.js";

const NODE = "PipeMeshReport";
const WIDGET = "text";
const EMPTY = "Run the workflow to see the report.";
const WIDTH = 420;
const TEXT_HEIGHT = 330; // all of a report on two ranks; a picture below it would squeeze it to a few lines

function addText(node) {
  const { widget } = ComfyWidgets.STRING(node, WIDGET, ["STRING", { multiline: true, placeholder: EMPTY }], app);
  widget.serialize = false; // in saved workflows
  widget.options.serialize = false; // in prompts
  widget.options.read_only = true;
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

function showText(node, output) {
  const widget = node?.widgets?.find((one) => one.name === WIDGET);
  const text = output?.text;
  if (widget && text) widget.value = Array.isArray(text) ? text.join("\n") : text;
}

app.registerExtension({
  name: "PipeMesh.Report",
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (nodeData.name !== NODE) return;
    const created = nodeType.prototype.onNodeCreated;
    nodeType.prototype.onNodeCreated = function (...args) {
      created?.apply(this, args);
      addText(this);
    };
    const widgetAdded = nodeType.prototype.addCustomWidget;
    nodeType.prototype.addCustomWidget = function (...args) {
      const widget = widgetAdded.apply(this, args);
      requestAnimationFrame(() => fit(this)); // the picture's own widget comes when it has been loaded
      return widget;
    };
    const executed = nodeType.prototype.onExecuted;
    nodeType.prototype.onExecuted = function (output) {
      executed?.apply(this, [output]);
      showText(this, output);
    };
  },
  // Outputs of an earlier run, when its workflow is opened again.
  onNodeOutputsUpdated(outputs) {
    for (const [id, output] of Object.entries(outputs)) {
      const node = app.graph?.getNodeById(id);
      if (node?.comfyClass === NODE) showText(node, output);
    }
  },
});
