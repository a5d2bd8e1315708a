// The API from openapi.json: every route with the fields of its body.

function add(parent, tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  parent.append(element);
  return element;
}

function kindOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
  const members = schema.anyOf ?? schema.oneOf;
  if (members) return members.map(kindOf).join(" or ");
  if (schema.type === "array") return `list of ${kindOf(schema.items ?? {})}`;
  return schema.type ?? "any";
}

function showFields(parent, schema, required = schema.required ?? []) {
  const table = add(parent, "table");
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const row = add(table, "tr");
    add(add(row, "td"), "code", name);
    const kind = kindOf(field) + (required.includes(name) ? ", required" : "");
    add(row, "td", kind, "kind");
    add(row, "td", field.description ?? (field.default === undefined ? "" : `default ${JSON.stringify(field.default)}`));
  }
}

function showRoute(parent, document_, method, path, route) {
  const details = add(parent, "details");
  const summary = add(details, "summary");
  add(summary, "b", method.toUpperCase());
  add(summary, "code", path);
  if (route.description) add(details, "p", route.description);
  const name = route.requestBody?.content?.["application/json"]?.schema?.$ref?.split("/").at(-1);
  const schema = name && document_.components.schemas[name];
  if (schema) {
    add(details, "h3", `Body: ${name}`);
    showFields(details, schema);
  }
  for (const [status, response] of Object.entries(route.responses ?? {})) add(details, "p", `${status}: ${response.description}`, "kind");
}

async function main() {
  const target = document.getElementById("main");
  try {
    const document_ = await (await fetch("openapi.json")).json();
    target.replaceChildren();
    for (const [path, methods] of Object.entries(document_.paths)) {
      for (const [method, route] of Object.entries(methods)) showRoute(target, document_, method, path, route);
    }
    add(target, "h2", "Types");
    for (const [name, schema] of Object.entries(document_.components.schemas)) {
      const details = add(target, "details");
      add(details, "summary", name);
      if (schema.description) add(details, "p", schema.description);
      showFields(details, schema);
    }
  } catch (error) {
    target.replaceChildren();
    add(target, "p", `openapi.json cannot be read: ${error}`);
  }
}

main();
