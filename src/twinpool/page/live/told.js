// What was decided, and why, in the words of the gateway.

import { element, keep, say } from "./dom.js";
import { age, seconds } from "./figures.js";

const MOVES_SHOWN = 8;

export function showBalance(node, balance) {
  if (balance) say(node, `Balance (${balance.mode}): ${balance.words}.`);
  else say(node, "Balance is off: a worker moves when a person asks for it.");
}

export function showMoves(list, moves) {
  const shown = moves.slice(-MOVES_SHOWN).reverse();
  keep(list, shown, (move) => move.number, (move) => row(move.role), (node, move) => fill(node, move.age_s, move.words));
  if (!shown.length) keep(list, [null], () => "none", () => element("li", "none"), (node) => say(node, "Nobody has moved yet."));
}

export function showDecisions(list, decisions) {
  const shown = [...decisions].reverse();
  const key = (decision) => `${decision.request} ${decision.attempt} ${decision.choice}`;
  keep(list, shown, key, (decision) => row(decision.choice), (node, decision) => fill(node, decision.age_s, decision.words, outcomeOf(decision)));
  if (!shown.length) keep(list, [null], () => "none", () => element("li", "none"), (node) => say(node, "No request yet."));
}

/** What was predicted and what came, as far as either is known. */
function outcomeOf(decision) {
  const { predicted_ttft_s: predicted, ttft_s: came } = decision;
  if (came == null) return predicted == null ? "" : `first token expected after ${seconds(predicted)}`;
  return predicted == null ? `first token after ${seconds(came)}` : `first token after ${seconds(came)}, expected ${seconds(predicted)}`;
}

function row(kind) {
  const made = element("li", "", element("time"), element("span"), element("small"));
  made.dataset.kind = kind;
  return made;
}

function fill(node, ageS, words, more = "") {
  const [time, said, rest] = node.children;
  say(time, ageS < 1 ? "now" : age(ageS));
  say(said, words);
  say(rest, more);
}
