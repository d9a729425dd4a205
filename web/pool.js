// PipeMesh Pool: what counts for its layout is shown, the rest is folded away. A workflow that was saved before there was
// a choice of layout means what it meant: by hand.
import { app } from "../../scripts/app.js";

const NODE = "PipeMeshPool";
const LAYOUT = "layout";
const BY_HAND = "by hand";
const AUTO = "auto";
const ALWAYS = new Set(["devices", "weights", LAYOUT]);

const layoutOf = (node) => node.widgets?.find((one) => one.name === LAYOUT);

function fold(node) {
  const layout = layoutOf(node);
  if (!layout) return;
  for (const widget of node.widgets) {
    if (ALWAYS.has(widget.name)) continue;
    const hidden = layout.value === AUTO && !node.inputs?.some((one) => one.widget?.name === widget.name && one.link != null);
    widget.hidden = hidden;
    widget.options.hidden = hidden; // what Nodes 2.0 looks at
  }
  node.widgets = [...node.widgets]; // and what makes it look
  const width = node.size?.[0] ?? 0;
  node.setSize?.([width, node.computeSize([width, 0])[1]]);
  node.setDirtyCanvas?.(true, true);
}

app.registerExtension({
  name: "PipeMesh.Pool",
  beforeRegisterNodeDef(nodeType, nodeData) {
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
      layout.value = AUTO; // of a new node; what a workflow has saved comes next
      fold(this);
    };
    const configured = nodeType.prototype.onConfigure;
    nodeType.prototype.onConfigure = function (saved, ...args) {
      configured?.apply(this, [saved, ...args]);
      const layout = layoutOf(this);
      if (layout && !knowsLayout(this, saved)) layout.value = BY_HAND;
      fold(this);
    };
  },
});

function knowsLayout(node, saved) {
  const place = node.widgets.filter((one) => one.serialize !== false).findIndex((one) => one.name === LAYOUT);
  return Array.isArray(saved?.widgets_values) && saved.widgets_values.length > place;
}
