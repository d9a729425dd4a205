// The page's one look at what it queues.
import { api } from "../../scripts/api.js";

const watchers = [];

// Calls `watch` with the promise of ComfyUI's answer to each prompt, as it is queued and before the page sees the answer.
export function onQueue(watch) {
  if (watchers.push(watch) > 1) return;
  const queue = api.queuePrompt;
  api.queuePrompt = function (...args) {
    const answer = queue.apply(this, args);
    for (const one of watchers) one(Promise.resolve(answer));
    return answer;
  };
}
