// Reads JSON Schema, and what models declare, for forms: no names of elements here, and no requests.

const DEEPEST = 6;

export function resolve(schema, root) {
  let found = schema;
  for (let steps = 0; found && typeof found.$ref === "string" && steps < 20; steps++) {
    if (!found.$ref.startsWith("#/")) return {};
    found = found.$ref.slice(2).split("/").reduce(
      (place, step) => (place == null ? undefined : place[decodeURIComponent(step).replace(/~1/g, "/").replace(/~0/g, "~")]),
      root,
    );
  }
  return found && typeof found === "object" ? found : {};
}

// Of several alternatives the first that is not null.
export function plain(schema, root) {
  let found = resolve(schema, root);
  for (let steps = 0; steps < 5; steps++) {
    const options = found.anyOf || found.oneOf || found.allOf;
    if (!Array.isArray(options) || found.type) break;
    const useful = options.map((each) => resolve(each, root)).find((each) => each.type !== "null");
    found = { ...useful, ...(found.description ? { description: found.description } : {}) };
  }
  return Array.isArray(found.type) ? { ...found, type: found.type.find((each) => each !== "null") } : found;
}

export function exampleOf(schema, root, depth = 0) {
  const it = plain(schema, root);
  if ("default" in it) return it.default;
  if (Array.isArray(it.examples) && it.examples.length) return it.examples[0];
  if ("const" in it) return it.const;
  if (Array.isArray(it.enum) && it.enum.length) return it.enum[0];
  if (depth >= DEEPEST) return null;
  if (it.type === "object" || it.properties) {
    const required = new Set(it.required || Object.keys(it.properties || {}));
    return Object.fromEntries(
      Object.entries(it.properties || {}).filter(([name]) => required.has(name))
        .map(([name, each]) => [name, exampleOf(each, root, depth + 1)]),
    );
  }
  if (it.type === "array") return it.items ? [exampleOf(it.items, root, depth + 1)] : [];
  if (it.type === "integer" || it.type === "number") return it.minimum ?? it.exclusiveMinimum ?? 0;
  if (it.type === "boolean") return false;
  return it.type === "string" ? "" : null;
}

// In a few words: `list of text`, `number`, `text or null`.
export function wordOf(schema, root, depth = 0) {
  const it = resolve(schema, root);
  if (!Object.keys(it).length) return "anything";
  if (Array.isArray(it.enum)) return it.enum.map((each) => JSON.stringify(each)).join(" | ");
  if ("const" in it) return JSON.stringify(it.const);
  const options = it.anyOf || it.oneOf;
  if (options) {
    const useful = options.filter((each) => resolve(each, root).type !== "null");
    return depth >= DEEPEST ? "…" : [...new Set(useful.map((each) => wordOf(each, root, depth + 1)))].join(" or ");
  }
  if (it.type === "array") return depth >= DEEPEST || !it.items ? "list" : `list of ${wordOf(it.items, root, depth + 1)}`;
  if (it.format === "binary") return "bytes";
  return { string: "text", integer: "whole number", boolean: "true or false" }[it.type] || it.type || (it.properties ? "object" : "anything");
}

// The shape of one item, without the batch axis.
const itemShape = (tensor) => (tensor.shape || []).filter((size) => size !== "batch");

// `float32 [28, 28]`: dtype and shape of one item.
function tensorWord(tensor) {
  const shape = itemShape(tensor);
  return shape.length ? `${tensor.dtype} [${shape.join(", ")}]` : String(tensor.dtype);
}

// What a version takes, as the form's fields; null where it declares no fields.
export function fieldsOf(declaration) {
  if (!declaration) return null;
  if (declaration.kind === "tensors" && Array.isArray(declaration.inputs))
    return declaration.inputs.map((each) => ({
      name: String(each.name),
      kind: "tensor",
      dtype: String(each.dtype),
      shape: itemShape(each),
      isOptional: !!each.optional,
      hint: tensorWord(each),
    }));
  const root = declaration.input && declaration.input.schema;
  if (!root) return null;
  const schema = plain(root, root);
  if (!schema.properties) return null;
  const required = new Set(schema.required || []);
  return Object.entries(schema.properties).map(([name, each]) => {
    const it = plain(each, root);
    const kind = Array.isArray(it.enum) ? "choice"
      : { string: "text", integer: "number", number: "number", boolean: "flag" }[it.type] || "json";
    return {
      name,
      kind,
      schema: it,
      isOptional: !required.has(name),
      isWhole: it.type === "integer",
      hint: [wordOf(each, root), it.description].filter(Boolean).join(" · "),
      example: exampleOf(each, root),
    };
  });
}

// What a declared model gives, in a few words; "" where nothing is declared.
export function givenBy(declaration) {
  if (!declaration) return "";
  if (Array.isArray(declaration.outputs))
    return declaration.outputs.map((each) => `${each.name}: ${tensorWord(each)}`).join(", ");
  const { type, schema, stream } = declaration.output || {};
  const word = { json: "JSON", text: "text", bytes: "bytes", image: "a picture", events: "a stream of events" }[type] || "";
  const members = schema && plain(schema, schema).properties;
  const named = members ? `JSON with ${Object.keys(members).slice(0, 12).join(", ")}` : word;
  return stream && type !== "events" ? `a stream${named ? ` of ${named}` : ""}` : named;
}

const sizeOf = (size) => (typeof size === "number" ? size : 2); // a name stands for a size that varies

// A tensor of one item: zeros, or random values of its type.
export function tensorOf(field, isRandom) {
  const draw = () => {
    if (field.dtype === "bool") return isRandom && Math.random() < 0.5;
    if (!isRandom) return 0;
    if (field.dtype.startsWith("uint8")) return Math.floor(Math.random() * 256);
    return /float/.test(field.dtype) ? Math.round(Math.random() * 1000) / 1000 : Math.floor(Math.random() * 10);
  };
  const build = (shape) => (shape.length ? Array.from({ length: sizeOf(shape[0]) }, () => build(shape.slice(1))) : draw());
  const count = field.shape.reduce((all, size) => all * sizeOf(size), 1);
  return count <= 200000 ? JSON.stringify(build(field.shape)) : "";
}

export function firstValue(field) {
  if (field.kind === "tensor") return field.isOptional ? "" : tensorOf(field, false);
  if (field.isOptional && field.example == null) return "";
  if (field.kind === "json") return JSON.stringify(field.example);
  if (field.kind === "flag") return String(!!field.example);
  return field.example == null ? "" : String(field.example);
}

// The value of a field as JSON has it; undefined leaves it out. Throws an error with a sentence.
export function readField(field, text) {
  if (field.kind === "text") return text === "" && field.isOptional ? undefined : text;
  if (text.trim() === "") {
    if (field.isOptional) return undefined;
    throw new Error(`${field.name} is empty.`);
  }
  if (field.kind === "flag") return text === "true";
  if (field.kind === "choice") return field.schema.enum.find((each) => String(each) === text);
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${field.name} is not JSON: ${error.message}.`);
  }
}
