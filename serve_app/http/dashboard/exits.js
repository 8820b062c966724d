"use strict";
/* Where tokens leave the models, and why they do not leave elsewhere. Pure, as view.js is. */

const Exits = (() => {
  /**
   * Tokens by layers run, by depth class: what happened between two views, or since the start
   * where there is no earlier one. A counter that fell belongs to a new process; of a replica that
   * the earlier view lacks nobody knows how many are new. An exit that no token left at says why.
   */
  function byClass(view, before) {
    const replicaOf = new Map((view.replicas ?? []).map((r) => [r.name, r]));
    const found = new Map();
    for (const [name, now] of Object.entries(view.exits ?? {})) {
      const where = replicaOf.get(name)?.depth_class;
      if (where === undefined) continue;
      const then = before && (before.exits?.[name] ?? now);
      const grown = (value, old) => Math.max(0, old === undefined || value < old ? value : value - old);
      if (!found.has(where)) found.set(where, {
        tokens: new Map(), uses: [], breaches: 0, lowered: 0, early: 0, stays: 0, drafted: 0, accepted: 0,
        depths: new Map(),
      });
      const sum = found.get(where);
      for (const [layer, value] of Object.entries(now.tokens)) {
        const more = grown(value, then?.tokens?.[layer]);
        sum.tokens.set(Number(layer), (sum.tokens.get(Number(layer)) ?? 0) + more);
      }
      sum.uses.push(now.uses ?? {});
      sum.breaches += grown(now.breaches, then?.breaches);
      sum.lowered += grown(now.lowered ?? 0, then?.lowered);
      for (const [tenth, values] of Object.entries(now.depths ?? {})) {
        const all = sum.depths.get(tenth) ?? { tokens: 0, expected: 0, run: 0 };
        for (const name of Object.keys(all)) all[name] += grown(values[name], then?.depths?.[tenth]?.[name]);
        sum.depths.set(tenth, all);
      }
      sum.early += grown(now.involuntary_exits, then?.involuntary_exits);
      sum.stays += grown(now.involuntary_stays, then?.involuntary_stays);
      sum.drafted += grown(now.drafted ?? 0, then?.drafted);
      sum.accepted += grown(now.accepted ?? 0, then?.accepted);
    }
    return [...found.entries()]
      .sort(([a], [b]) => (a < b ? -1 : 1))
      .map(([name, sum]) => {
        for (const layer of sum.uses.flatMap((u) => Object.keys(u))) {
          if (!sum.tokens.has(Number(layer))) sum.tokens.set(Number(layer), 0);
        }
        const bars = [...sum.tokens.entries()].sort(([a], [b]) => a - b);
        const total = bars.reduce((all, [, tokens]) => all + tokens, 0);
        return {
          name,
          total,
          mean_depth: total ? bars.reduce((s, [layer, n]) => s + layer * n, 0) / total : null,
          breach_share: total ? sum.breaches / total : null,
          breaches: sum.breaches,
          lowered: sum.lowered,
          depths: [...sum.depths.entries()].filter(([, d]) => d.tokens > 0).sort(([a], [b]) => a - b).map(([, d]) => ({
            tokens: d.tokens,
            expected: d.expected / d.tokens,
            run: d.run / d.tokens,
            share: bars.length ? d.run / d.tokens / bars[bars.length - 1][0] : 0,
          })),
          involuntary_exits: sum.early,
          involuntary_stays: sum.stays,
          drafted: sum.drafted,
          accepted: sum.accepted,
          bars: bars.map(([layer, tokens]) => ({
            layer,
            tokens,
            share: total ? tokens / total : 0,
            why: tokens ? "" : unused(name, layer, sum.uses, total > 0),
          })),
        };
      });
  }

  /** Why no token leaves at an exit of a class, by what its replicas say of it. */
  function unused(name, layer, replicas, hasTokens) {
    const counts = new Map();
    for (const uses of replicas) {
      const use = uses[layer];
      if (use !== undefined) counts.set(use, (counts.get(use) ?? 0) + 1);
    }
    const [most] = [...counts.entries()].sort(([, a], [, b]) => b - a);
    if (most === undefined) return "";
    const [use, num] = most;
    const testsAny = replicas.some((uses) => Object.values(uses).includes("tested"));
    const text = {
      tested: hasTokens ? "no token was sure enough to leave here" : "tested: tokens that are sure enough leave here",
      not_worth_it: testsAny
        ? "DREX's plan leaves it out: at this load the other exits pay more"
        : "DREX's plan tests no exit: at this load a full pass is cheaper",
      drafts: "drafts tokens that the whole model verifies",
      drafts_not_worth_it: "could draft, but full passes are measured to be faster at this load",
      full_depth_asked: "requests want the full model's answer: no token leaves early",
      not_loaded: `exit not loaded: this class runs ${String(name).split("@").pop()} layers`,
      off: "exits are off: decode.rebatching is off",
      idle: "nothing has run here yet",
    }[use];
    const of = num < replicas.length ? ` (${num} of ${replicas.length} replicas)` : "";
    return `${text ?? use}${of}`;
  }

  /** What is to be said of a class's exits beside its bars: only what happened. */
  function notes(c) {
    const deepest = c.bars.length ? c.bars[c.bars.length - 1].layer : null;
    const parts = c.mean_depth === null ? [] : [`mean depth ${c.mean_depth.toFixed(1)} of ${deepest}`];
    if (c.breaches) parts.push(`below their threshold ${View.count(c.breaches)} (${View.percent(c.breach_share)})`);
    if (c.lowered) parts.push(`below it within their quality budget ${View.count(c.lowered)}`);
    if (c.involuntary_stays) parts.push(`carried on with their batch ${View.count(c.involuntary_stays)}`);
    if (c.drafted) parts.push(`drafted ${View.count(c.drafted)}, of which ${View.percent(c.accepted / c.drafted)} agreed`);
    if (c.involuntary_exits) parts.push(`pushed out early ${View.count(c.involuntary_exits)}`);
    return parts.join(" · ");
  }

  return { byClass, notes };
})();
