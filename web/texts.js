// The texts of PipeMesh's own parts of the page, in the language that the page has when one is asked for:
// locales/LANGUAGE/main.json.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

let all; // a promise of every language's texts

const load = async () => {
  const answer = await api.fetchApi("/i18n");
  return answer.ok ? await answer.json() : {};
};

// Returns a function: name of a text, values for its %1, %2 ... -> the text.
export async function texts() {
  all ??= load().catch(() => ({}));
  const known = await all;
  const english = known.en?.pipemesh ?? {};
  return (name, ...values) => {
    const language = String(app.extensionManager?.setting?.get("Comfy.Locale") ?? "en");
    const own = known[language]?.pipemesh ?? known[language.split("-")[0]]?.pipemesh ?? {};
    const text = own[name] ?? english[name] ?? name;
    return text.replace(/%(\d)/g, (_, place) => values[place - 1] ?? "");
  };
}
