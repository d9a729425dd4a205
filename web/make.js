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
