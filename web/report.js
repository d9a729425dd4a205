// Shows the text of PipeMesh Report on the node: ComfyUI itself does this for its own preview nodes only.
import { app } from "../../scripts/app.js";
import { ComfyWidgets } from "../../scripts/widgets.js";

const NODE = "PipeMeshReport";
const WIDGET = "text";
const EMPTY = "Run the workflow to see the report.";

function addText(node) {
  const { widget } = ComfyWidgets.STRING(node, WIDGET, ["STRING", { multiline: true, placeholder: EMPTY }], app);
  widget.serialize = false; // in saved workflows
  widget.options.serialize = false; // in prompts
  widget.options.read_only = true;
  const area = widget.element;
  if (area) {
    area.readOnly = true;
    Object.assign(area.style, { fontFamily: "monospace", whiteSpace: "pre", overflow: "auto" });
  }
  node.setSize?.([Math.max(node.size[0], 420), Math.max(node.size[1], 440)]);
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
