// Makes an element: its class, text, attributes and handlers, and what is in it, as far as there is any.
export function make(tag, given = {}, ...children) {
  const { className, text, ...attributes } = given;
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element[name] = value;
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(Boolean));
  return element;
}

const keyOf = (one) => one.dataset?.key;

// Gives `shown` the attributes, handlers and children of `wanted`. An element that both have stays the same element, so
// its focus, scroll position and selection stay, open details stay open, and a click that has begun is not lost.
export function update(shown, wanted) {
  if (shown.nodeType !== Node.ELEMENT_NODE) {
    if (shown.data !== wanted.data) shown.data = wanted.data;
    return;
  }
  for (const { name } of [...shown.attributes]) if (name !== "open" && !wanted.hasAttribute(name)) shown.removeAttribute(name);
  for (const { name, value } of wanted.attributes) if (shown.getAttribute(name) !== value) shown.setAttribute(name, value);
  shown.onclick = wanted.onclick;
  updateChildren(shown, [...wanted.childNodes]);
}

// The same for children: both have an element if its data-key is the same. Elements without one are the same if their tag
// and class are, in order.
export function updateChildren(shown, wanted) {
  const before = [...shown.childNodes];
  let last = -1; // the place in `before` of the last that was found
  const kept = new Map(); // wanted child -> the shown one
  for (const child of wanted) {
    const isThis = (one, place) =>
      one.nodeName === child.nodeName &&
      keyOf(one) === keyOf(child) &&
      (keyOf(one) || (place > last && one.className === child.className));
    const place = before.findIndex(isThis);
    if (place < 0) continue;
    last = Math.max(last, place);
    kept.set(child, before[place]);
  }
  const stay = new Set(kept.values());
  for (const one of before) if (!stay.has(one)) one.remove();
  wanted.forEach((child, place) => {
    const one = kept.get(child) ?? child;
    if (one !== child) update(one, child);
    if (shown.childNodes[place] !== one) shown.insertBefore(one, shown.childNodes[place] ?? null);
  });
}
