// The texts of PipeMesh's own parts of the page, in the language that the page has when one is asked for:
// locales/LANGUAGE/main.json.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const AGAIN_MS = 5000; // until texts that did not come are asked for again
let known = {}; // language -> its texts
let asked; // a promise of the first answer

async function ask() {
  try {
    const answer = await api.fetchApi("/i18n");
    if (!answer.ok) throw new Error(answer.statusText);
    known = await answer.json();
  } catch {
    setTimeout(ask, AGAIN_MS);
  }
}

// Returns a function: name of a text, values for its %1, %2 ... -> the text.
export async function texts() {
  await (asked ??= ask());
  return (name, ...values) => {
    const language = String(app.extensionManager?.setting?.get("Comfy.Locale") ?? "en");
    const own = known[language]?.pipemesh ?? known[language.split("-")[0]]?.pipemesh ?? {};
    const text = own[name] ?? known.en?.pipemesh?.[name] ?? name;
    return text.replace(/%(\d)/g, (_, place) => values[place - 1] ?? "");
  };
}
