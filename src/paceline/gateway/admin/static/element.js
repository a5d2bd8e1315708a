// Creates elements. Text from the server is never parsed as HTML.

export function element(tag, properties = {}, ...children) {
  const created = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") created.className = value;
    else if (name.includes("-") || name === "role" || name === "scope") created.setAttribute(name, value);
    else created[name] = value;
  }
  created.append(...children);
  return created;
}

export const byId = (id) => document.getElementById(id);
