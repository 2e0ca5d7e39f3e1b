// Addresses within the dashboard: `#/models/NAME/VERSION` is `{ page: "model", name, version }`. Pure.

const LONGEST = 2000; // characters: longer than any name of a model or id of a request that the server takes

export const PAGES = [["overview", "#/", "Overview"], ["requests", "#/requests", "Requests"], ["register", "#/register", "Register"]];

export function routeOf(hash) {
  const [path, query] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  // The page of a request says itself what is wrong with an id.
  if (/^requests\/./s.test(path)) return { page: "request", id: decoded(path.slice("requests/".length)) };
  if (hash.length > LONGEST) return { page: "unknown" };
  let words;
  try { words = path.split("/").map(decodeURIComponent); } catch { return { page: "unknown" }; }
  const parameters = Object.fromEntries(new URLSearchParams(query || ""));
  const [first, second = "", third = ""] = words;
  if (words.length > 3) return { page: "unknown" };
  if (first === "" && words.length === 1) return { page: "overview", parameters };
  if (first === "models" && second) return { page: "model", name: second, version: third, parameters };
  if (first === "profile" && second) return { page: "profile", name: second, version: third, parameters };
  if (first === "optimise" && second) return { page: "optimise", name: second, version: third, parameters };
  if (first === "requests" && words.length <= 2) return { page: "requests", parameters };
  if (first === "register" && words.length === 1) return { page: "register", parameters };
  return { page: "unknown" };
}

// A part of an address; one that is no UTF-8 stays as it is written.
function decoded(word) {
  try { return decodeURIComponent(word); } catch { return word; }
}

export const hashOf = (...words) => `#/${words.map(encodeURIComponent).join("/")}`;
export const ofModel = (name, version) => hashOf("models", name, ...(version ? [version] : []));
export const ofProfile = (name, version) => hashOf("profile", name, ...(version ? [version] : []));
export const ofOptimise = (name, version) => hashOf("optimise", name, ...(version ? [version] : []));
export const ofRequest = (id) => hashOf("requests", id);

export function titleOf(route) {
  if (route.page === "model") return route.name;
  if (route.page === "profile") return `Profile of ${route.name}`;
  if (route.page === "optimise") return `Builds of ${route.name}`;
  if (route.page === "request") return `Request ${route.id}`;
  const found = PAGES.find(([page]) => page === route.page);
  return found ? found[2] : "Not found";
}
