// The panel of PipeMesh in the sidebar: devices, pools, models, runs and notices, as GET /pipemesh/status has them, live.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { make, updateChildren } from "./make.js";
import { served } from "./served.js";
import { texts } from "./texts.js";

const GIB = 2 ** 30;
const SOON_MS = 300; // events that come together are one look
const EVERY_MS = 5000; // while the panel is open, for what no event tells of: a worker that dies between runs
const EVENTS = ["status", "executing", "progress_state", "execution_success", "execution_error", "execution_interrupted", "pipemesh.notice"];
const AXES = { pipefusion: "#d33f49", ulysses: "#f2a6a6", ring: "#7a1f5c", weights: "#8c564b", gather: "#f7d488" };
const STYLE = `
.pipemesh { box-sizing: border-box; height: 100%; overflow: auto; padding: 12px; color: var(--fg-color); font-size: 13px; line-height: 1.45;
  overflow-wrap: break-word; }
.pipemesh * { box-sizing: border-box; }
.pipemesh h1 { margin: 0 0 12px; font-size: 15px; font-weight: 600; }
.pipemesh h2 { margin: 18px 0 6px; font-size: 13px; font-weight: 600; }
.pipemesh h1 + h2 { margin-top: 0; }
.pipemesh p { margin: 4px 0; }
.pipemesh .quiet { color: var(--descrip-text); }
.pipemesh .big { font-size: 24px; font-weight: 700; line-height: 1.2; }
.pipemesh .card { border: 1px solid var(--border-color); border-radius: 6px; padding: 8px 10px; margin: 6px 0; background: var(--comfy-input-bg); }
.pipemesh .fault { border-color: var(--error-text); }
.pipemesh .row { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 2px 10px; }
.pipemesh .row > * { min-width: 0; } /* a long word breaks only where it has a line of its own */
.pipemesh .bar { height: 6px; border-radius: 3px; background: var(--border-color); overflow: hidden; margin: 2px 0 6px; display: flex; }
.pipemesh .bar > span { display: block; height: 100%; background: var(--p-primary-color, #2a78d6); }
.pipemesh .bar > span.other { background: var(--descrip-text); }
.pipemesh .key { display: inline-block; width: 8px; height: 8px; margin-right: 6px; border-radius: 2px; }
${Object.entries(AXES).map(([axis, colour]) => `.pipemesh .axis-${axis}, .pipemesh .bar > span.axis-${axis} { background: ${colour}; }`).join("\n")}
.pipemesh pre { margin: 6px 0; max-height: 160px; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 11px; }
.pipemesh .acts { display: flex; flex-wrap: wrap; gap: 6px; margin-top: 6px; }
.pipemesh button { border: 1px solid var(--border-color); border-radius: 4px; padding: 4px 10px; cursor: pointer;
  background: var(--comfy-menu-bg); color: var(--input-text); font: inherit; }
.pipemesh button:hover:not([aria-disabled]) { border-color: var(--fg-color); }
.pipemesh button:focus-visible, .pipemesh summary:focus-visible { outline: 2px solid var(--p-primary-color, #2a78d6); outline-offset: 1px; }
.pipemesh button[aria-disabled] { opacity: 0.5; cursor: default; }
.pipemesh ul { margin: 4px 0; padding-left: 18px; }
.pipemesh details { margin: 4px 0; }
.pipemesh summary { cursor: pointer; }
.pipemesh img { max-width: 100%; border-radius: 4px; }`;

const heading = (key, text) => make("h2", { text, "data-key": key });

const quiet = (text) => make("p", { className: "quiet", text });

// A line with something at its left end and a text at its right one.
const row = (left, right, className = "row") =>
  make("div", { className }, make("span", {}, ...[left].flat()), make("span", { className: "quiet", text: right }));

// Details, known by `key` from one status to the next.
const details = (key, text, ...children) => make("details", { "data-key": key }, make("summary", { text }), ...children);

const list = (lines) => make("ul", {}, ...lines.map((text) => make("li", { text })));

const duration = (seconds) => (seconds < 90 ? `${Math.ceil(seconds)} s` : `${Math.ceil(seconds / 60)} min`);
const size = (bytes) => `${(bytes / GIB).toFixed(bytes < GIB ? 2 : 1)} GiB`;

class Panel {
  constructor(root, t) {
    this.root = root;
    this.root.tabIndex = -1; // where the focus goes of a button that is there no more
    this.t = t;
    this.waiting = null; // what pipemesh.progress said last
    this.error = "";
    this.busy = false; // a button's act is on its way
    this.status = null; // what is shown: the last that was read
    this.unread = ""; // why the status could not be read now
    this.asked = 0; // looks so far
    this.drawn = 0; // the one whose answer is shown: an older one may come later
    this.look = () => {
      if (document.hidden) return; // nobody sees it; what was missed is asked for when the page is shown again
      this.soon ??= setTimeout(() => ((this.soon = undefined), this.refresh()), SOON_MS);
    };
    const progress = ({ detail }) => {
      this.waiting = detail;
      this.look();
    };
    const forget = () => (this.waiting = null);
    this.closing = new AbortController();
    const until = { signal: this.closing.signal };
    for (const name of EVENTS) api.addEventListener(name, this.look, until);
    api.addEventListener("pipemesh.progress", progress, until);
    api.addEventListener("progress", forget, until); // the sampler's own steps have begun
    api.addEventListener("executing", forget, until);
    document.addEventListener("visibilitychange", this.look, until);
    this.timer = setInterval(this.look, EVERY_MS);
    this.refresh();
  }

  close() {
    clearInterval(this.timer);
    clearTimeout(this.soon);
    this.closing.abort();
  }

  async refresh() {
    const number = ++this.asked;
    try {
      const answer = await api.fetchApi("/pipemesh/status", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      const status = await answer.json();
      if (number < this.drawn) return;
      this.drawn = number;
      this.status = status;
      this.unread = "";
    } catch (error) {
      if (number < this.drawn) return;
      this.unread = this.t("unreachable", error.message);
    }
    this.draw(this.status);
  }

  // Acts on a pool, one act at a time; what went wrong is shown where the buttons are. Returns whether it was done.
  async act(pool, act) {
    if (this.busy) return false; // the second click of two
    this.busy = true;
    this.error = "";
    if (this.status) this.draw(this.status);
    try {
      const answer = await api.fetchApi(`/pipemesh/pools/${pool.id}/${act}`, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
      });
      if (!answer.ok) this.error = (await answer.json().catch(() => ({}))).error || this.t(answer.status === 403 ? "forbidden" : "refused", answer.status);
    } catch (error) {
      this.error = this.t("no_answer", error.message);
    }
    this.busy = false;
    await this.refresh();
    return !this.error;
  }

  // Shows a status. If the element with the focus is gone, the panel has the focus.
  draw(status) {
    const { root } = this;
    const focused = root.contains(document.activeElement);
    const unread = this.unread ? make("p", { role: "alert", text: this.unread }) : "";
    updateChildren(root, [make("h1", { text: "PipeMesh" }), unread, ...(status ? this.parts(status) : [])].filter(Boolean));
    if (focused && !root.contains(document.activeElement)) root.focus();
  }

  parts(status) {
    const { t } = this;
    const run = status.last_runs[0];
    return [
      ...this.now(status),
      ...(run ? this.lastRun(run, status) : []),
      heading("devices", t("devices")),
      ...status.devices.map((device) => this.device(device)),
      heading("pools", t("pools")),
      ...this.pools(status),
      this.error ? make("p", { role: "alert", text: this.error }) : "",
      heading("runs", t("runs")),
      this.runs(status.last_runs),
      heading("notices", t("notices")),
      ...this.notices(status.notices),
    ];
  }

  // A text of the status in the language of the page.
  said({ name, values }) {
    return this.t(name, ...values);
  }

  now(status) {
    const { t } = this;
    const { on, unavailable } = status.auto;
    const auto = unavailable ? this.said(unavailable) : t(on ? "auto_on" : "auto_off");
    const run = status.current_run;
    const { done, total } = this.waiting ?? run?.steps ?? {};
    const begun = ({ title, steps }) => (steps.total ? t("samples", title, steps.done, steps.total) : t("first_step", title));
    const text = this.waiting ? this.waiting.text : run ? begun(run) : t("idle");
    const left = (!this.waiting && run?.steps.left_s) || null;
    return [
      heading("now", t("now")),
      make("p", { role: "status", text }),
      total ? bar(t("progress"), [[done / total, ""]]) : "",
      left === null ? "" : quiet(t("left", duration(left))),
      quiet(auto),
      quiet(this.host(status.host)),
    ];
  }

  // Whether this ComfyUI is one that was tested, and what was verified here.
  host({ version, tested, verified, refused, pending }) {
    const { t } = this;
    const found = [
      ["host_verified", verified],
      ["host_refused", refused],
      ["host_pending", pending],
    ].filter(([, names]) => names.length);
    const said = found.map(([name, names]) => t(name, names.join(", ")));
    return [t(tested.includes(version) ? "host_tested" : "host_untested", version), ...said].join(" ");
  }

  // Why a run has no image: what the pool says, and how far it came.
  ended(run) {
    const { t } = this;
    const { done, total, fault } = run.steps;
    const early = done < total;
    return [
      early ? make("p", { className: "big", text: t("ended_early", done, total) }) : "",
      fault && !early ? make("p", { className: "big", text: t("not_begun") }) : "",
      fault ? make("p", { role: "alert", text: fault }) : "",
    ].filter(Boolean);
  }

  lastRun(run, status) {
    const { t } = this;
    const { speed, figures } = run;
    const pool = status.pools.find((one) => one.id === run.pool);
    const seconds = (number) => number.toFixed(number < 10 ? 2 : 1);
    const known = speed && speed.one_gpu_s !== null;
    const lines = this.ended(run);
    if (lines.length) {
      // no speed: there is no image that it would be of
    } else if (known) {
      lines.push(make("p", { className: "big", text: t("times", (speed.one_gpu_s / speed.step_s).toFixed(2)) }));
      lines.push(make("p", { text: t(speed.measured ? "timed" : "predicted", seconds(speed.step_s), seconds(speed.one_gpu_s)) }));
    } else if (speed) {
      lines.push(make("p", { className: "big", text: t("per_step", seconds(speed.step_s)) }));
      lines.push(quiet(t("not_timed")));
    }
    lines.push(make("p", { text: run.title }));
    const { queue } = run.steps;
    if (queue) lines.push(make("p", { text: t("queue", queue.at_once, queue.queued, status.queue.used, status.queue.dropped) }));
    if (queue?.first_s) lines.push(make("p", { text: t("queue_first", ...[queue.step_s, queue.first_s, queue.step_s / queue.at_once].map((one) => one.toFixed(2))) }));
    lines.push(...this.prompt(run.steps.prompt));
    lines.push(...this.plan(run.plan));
    for (const one of [...(pool?.why ?? []), ...(pool?.shares ?? [])]) lines.push(quiet(this.said(one)));
    lines.push(...this.communication(figures, pool?.backend));
    if (run.slowed.length) lines.push(make("p", { text: t("slowed") }), list(run.slowed.map((cause) => this.said(cause))));
    return [heading("last_run", t("last_run")), make("div", { className: run.steps.fault ? "card fault" : "card", "data-key": "run" }, ...lines)];
  }

  // How long one rank waited for messages, of the rank that did so most, by axis. Patches overlap, so their run has no share of its own.
  communication(figures, backend) {
    const { t } = this;
    const axes = Object.entries(figures?.exchange_by_axis ?? {}).sort(([, one], [, other]) => other - one);
    const known = figures?.exchange_share ?? null;
    if (known === null && !axes.length) return backend === "nccl" ? [quiet(t("not_measured"))] : [];
    const share = known ?? axes.reduce((sum, [, one]) => sum + one, 0);
    const said = t(known === null ? "waited" : "communication", Math.round(100 * share));
    const waited = ([axis, one]) =>
      row([make("span", { className: `key axis-${axis}` }), t(`axis_${axis}`)], `${(100 * one).toFixed(1)} %`, "row quiet");
    const parts = axes.length ? axes.map(([axis, one]) => [one, `axis-${axis}`]) : [[share, "other"]];
    return [make("p", { text: said }), bar(said, parts), ...axes.map(waited)];
  }

  // What its prompt waited for, and what would be left if the workers took no time.
  prompt(prompt) {
    const { t } = this;
    if (!prompt) return [];
    const { before_s, loading_s, first_s, sampling_s, vae, total_s, left_s, speedup, at_most } = prompt;
    const parts = [
      ["before", before_s],
      ["loading", loading_s],
      ["first", first_s],
      ["sampling", sampling_s],
      ...vae.map((one) => [one.work, one.seconds]),
      ["total", total_s],
      ["left", left_s],
    ].filter(([, value]) => value !== null);
    const rows = parts.map(([name, value]) => row(t(`prompt_${name}`), `${value.toFixed(2)} s`, "row quiet"));
    const bound = speedup === null ? "" : quiet(t("prompt_bound", speedup.toFixed(2), at_most.toFixed(2)));
    return [details("prompt", t("prompt"), ...rows, bound)];
  }

  // Why the run had its layout, what was predicted and achieved, and why others lose; nothing where it was said by hand.
  plan(plan) {
    const { t } = this;
    if (!plan) return [];
    if (plan.predicted_ms === null) return [quiet(t("plan_taken", plan.layout, plan.why))];
    const ms = (number) => number.toFixed(number < 10 ? 2 : 1);
    const lines = [
      make("p", { text: t("plan_chosen", plan.layout, plan.known ? t(`known_${plan.known}`, plan.box) : plan.why) }),
      make("p", { text: t("plan_predicted", ms(plan.predicted_ms)) }),
    ];
    if (plan.achieved_ms !== null) lines.push(make("p", { text: t("plan_achieved", ms(plan.achieved_ms)) }));
    if (!plan.losers.length) return lines;
    const slowest = Math.max(plan.predicted_ms, ...plan.losers.map((one) => one.predicted_ms ?? 0));
    const one = (layout, predicted, why, kind) => [
      row(layout, predicted === null ? "" : `${ms(predicted)} ms`),
      predicted === null ? "" : bar(`${layout} ${ms(predicted)} ms`, [[predicted / slowest, kind]]),
      quiet(why),
    ];
    const others = plan.losers.flatMap(({ layout, predicted_ms, why }) => one(layout, predicted_ms, this.said(why), "other"));
    const best = one(plan.layout, plan.predicted_ms, t("plan_best"), "");
    return [...lines, details("plan", t("plan_losers", plan.losers.length), ...best, ...others)];
  }

  device(device) {
    const { t } = this;
    const used = device.free === null ? null : (device.total - device.free) / device.total;
    const amount = used === null ? size(device.total) : t("used", size(device.total - device.free), size(device.total));
    const shown = used === null ? "" : bar(`${device.name} ${amount}`, [[used, ""]]);
    return make("div", {}, row(`${device.name} · ${device.title}`, amount), shown);
  }

  // Layouts that take no device now are not shown: to start one would end the pool that is up.
  pools({ pools, busy }) {
    const up = pools.filter((pool) => pool.state !== "closed");
    return up.length ? up.map((pool) => this.pool(pool, busy)) : [quiet(this.t("no_pool"))];
  }

  // busy: something samples or starts, and the server would refuse every act.
  pool(pool, busy) {
    const { t } = this;
    const live = pool.state === "ready" || pool.state === "busy";
    const failed = pool.state === "failed" || pool.fault;
    const [sentence, ...details] = (pool.fault ?? "").split("\n");
    // One that does nothing now keeps the focus, which a disabled one would lose.
    const button = (act, name, impossible, onclick = () => this.act(pool, act)) => {
      const off = impossible || busy || this.busy;
      return make("button", { text: name, "data-key": `${pool.id}-${act}`, "aria-disabled": off && "true", onclick: off ? null : onclick });
    };
    // The pool first: what ComfyUI has kept of an earlier run needs none, and would leave it as it is.
    const again = async () => {
      if (await this.act(pool, "restart")) app.queuePrompt(0);
    };
    const state = failed ? "failed" : pool.state;
    return make(
      "div",
      { className: failed ? "card fault" : "card", "data-key": pool.id },
      make("div", { className: "row" }, make("strong", { text: pool.layout }), make("span", { text: t(`state_${state}`) })),
      failed ? make("p", { role: "alert", text: sentence }) : "",
      failed && details.length ? make("pre", { text: details.join("\n"), tabindex: "0" }) : "",
      ...pool.ranks.map((rank) => this.rank(rank, live)),
      pool.models.length ? quiet(t("models")) : "",
      pool.models.length ? list(pool.models.map((one) => t(`model_${one.state}`, one.title))) : "",
      ...pool.models.flatMap((one) => one.graphs.map((text) => quiet(`${one.title}: ${this.said(text)}`))),
      make(
        "div",
        { className: "acts" },
        failed ? button("again", t("again"), false, again) : "",
        button("restart", t("restart"), false),
        button("unload", t("unload"), !live || !pool.models.length),
        button("release", t("release"), !live && !failed) // of a pool that lost a worker the others are up
      )
    );
  }

  rank(rank, live) {
    const { t } = this;
    const { memory } = rank;
    const name = t("rank", rank.rank, rank.device);
    if (!memory) return make("p", { text: name });
    const used = memory.total - memory.free;
    const amount = t("used", size(used), size(memory.total));
    return make(
      "div",
      {},
      row(name, live ? t(`phase_${rank.phase}`) : ""),
      bar(`${name} ${amount}`, [
        [memory.model / memory.total, ""],
        [Math.max(0, used - memory.model) / memory.total, "other"],
      ]),
      quiet(`${amount}, ${t("of_models", size(memory.model))}${memory.graphs ? `, ${t("of_graphs", size(memory.graphs))}` : ""}`)
    );
  }

  runs(runs) {
    const { t } = this;
    if (!runs.length) return quiet(t("no_run"));
    const took = (run) => (run.ended ? `, ${(run.ended - run.began).toFixed(1)} s` : "");
    return list(runs.slice(0, 5).map((run) => `${new Date(1000 * run.began).toLocaleTimeString()} · ${run.title}${took(run)}`));
  }

  notices(notices) {
    const { t } = this;
    if (!notices.length) return [quiet(t("no_notice"))];
    return notices.slice(0, 8).map((notice) => {
      const text = `${notice.node ? `${t("node", notice.node)} ` : ""}${notice.text}${notice.count > 1 ? ` (${notice.count}×)` : ""}`;
      if (!notice.detail) return make("p", { text });
      return details(`notice-${notice.at}`, text, make("pre", { text: notice.detail, tabindex: "0" }));
    });
  }
}

function bar(label, parts) {
  const shares = parts.map(([share, kind]) => make("span", { className: kind, style: `width: ${(100 * Math.min(1, share)).toFixed(1)}%` }));
  const whole = Math.round(100 * Math.min(1, parts.reduce((sum, [share]) => sum + share, 0)));
  const told = { role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": whole };
  return make("div", { className: "bar", ...told }, ...shares);
}

let panel;

const extension = {
  name: "PipeMesh.Panel",
  async setup() {
    const t = await texts();
    app.extensionManager.registerSidebarTab({
      id: "pipemesh",
      icon: "pi pi-th-large",
      title: "PipeMesh",
      tooltip: t("tooltip"),
      type: "custom",
      render(element) {
        panel?.close();
        const root = make("div", { className: "pipemesh" });
        element.replaceChildren(make("style", { text: STYLE }), root);
        panel = new Panel(root, t);
      },
      destroy() {
        panel?.close();
        panel = undefined;
      },
    });
  },
};

if (served) app.registerExtension(extension);
