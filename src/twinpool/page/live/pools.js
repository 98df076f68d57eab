// The pools and who stands in them. A worker that changes its pool is seen to go there.

import { element, keep, say } from "./dom.js";
import { age, count, percent, plural, tokens } from "./figures.js";

const MOVE_MS = 900;
const RECENT_S = 12; // so long a card says that it has just moved
const cards = new Map();
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export function showPools(parent, state) {
  say(parent.querySelector("#queue b"), count(state.requests.waiting));
  parent.querySelector("#queue").classList.toggle("busy", state.requests.waiting > 0);
  const underWay = (state.handles.held ?? 0) + (state.handles.sent ?? 0);
  say(parent.querySelector("#handoffs b"), count(underWay));
  parent.querySelector("#handoffs").classList.toggle("busy", underWay > 0);

  const moved = new Map(state.role_changes.map((change) => [change.worker, change]));
  const places = new Map([...cards].map(([id, card]) => [id, [card.parentElement, card.getBoundingClientRect()]]));
  for (const pool of parent.querySelectorAll(".pool")) {
    const members = state.workers.filter((worker) => worker.role === pool.dataset.role);
    pool.hidden = pool.dataset.role === "colocated" && members.length === 0;
    pool.classList.toggle("many", members.length > 16);
    say(pool.querySelector(".count"), plural(members.length, "worker"));
    const list = pool.querySelector(".workers");
    keep(list, members, (worker) => worker.id, cardOf, (card, worker) => fill(card, worker, moved.get(worker.id)));
  }
  forget(state.workers);
  for (const [id, [from, before]] of places) if (cards.get(id)?.parentElement !== from) slide(cards.get(id), before);
}

/** The same element in every pool, so that it can move. */
function cardOf(worker) {
  if (!cards.has(worker.id)) cards.set(worker.id, make());
  return cards.get(worker.id);
}

function make() {
  const use = element("div", "use", element("i"));
  use.setAttribute("aria-hidden", "true");
  const head = element("div", "head", element("b"), element("em"));
  return element("li", "worker", head, use, element("span"), element("small"));
}

function fill(card, worker, change) {
  const [head, use, load, remark] = card.children;
  const [name, state] = head.children;
  const isNew = change && change.age_s < RECENT_S;
  card.dataset.state = worker.state;
  card.classList.toggle("moved", Boolean(isNew));
  card.title = worker.url;
  say(name, worker.id);
  say(state, stateOf(worker, isNew ? change : null));
  use.style.setProperty("--at", `${100 * (worker.busy_ratio ?? 0)}%`);
  say(load, loadOf(worker));
  say(remark, worker.state === "ready" ? (worker.warning ?? "") : (worker.reason ?? ""));
}

function stateOf(worker, change) {
  const said = [];
  if (worker.state !== "ready") said.push(worker.state);
  if (worker.held) said.push("manual");
  if (change) said.push(`moved ${age(change.age_s)} ago`);
  return said.join(", ");
}

function loadOf(worker) {
  const room = worker.slots ? `${count(worker.sequences)} of ${count(worker.slots)}` : count(worker.sequences);
  const said = [worker.busy_ratio == null ? "" : `${percent(worker.busy_ratio)} busy`, `${room} running`];
  if (worker.prefill_tokens) said.push(`${tokens(worker.prefill_tokens)} tokens to read`);
  else if (worker.kv_tokens) said.push(`${tokens(worker.kv_tokens)} tokens of KV`);
  return said.filter(Boolean).join(" · ");
}

function forget(workers) {
  const known = new Set(workers.map((worker) => worker.id));
  for (const id of cards.keys()) if (!known.has(id)) cards.delete(id);
}

function slide(card, before) {
  if (!card || calm.matches) return;
  const now = card.getBoundingClientRect();
  const from = `translate(${before.left - now.left}px, ${before.top - now.top}px)`;
  card.animate([{ transform: from, zIndex: 1 }, { transform: "none", zIndex: 1 }], { duration: MOVE_MS, easing: "ease-in-out" });
}
