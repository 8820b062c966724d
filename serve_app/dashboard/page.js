"use strict";
/* Asks /cluster once a second and shows what View makes of it. Text goes in as text, never as HTML. */

(() => {
  const EVERY_MS = 1000;
  const TIMEOUT_MS = 5000;
  const SPAN_S = 10;
  const KEY_NAME = "quadriga-admin-key";
  const SVG = "http://www.w3.org/2000/svg";

  const at = (id) => document.getElementById(id);
  const past = []; // views of the last SPAN_S seconds, for rates
  let isPaused = false;
  let answeredMs = 0;

  function node(tag, text, attributes = {}, children = []) {
    const made = document.createElement(tag);
    if (text !== null && text !== undefined) made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function facts(pairs) {
    return pairs.map(([name, text]) => node("div", null, {}, [node("dt", name), node("dd", text)]));
  }

  function marked(what) {
    return node("span", `${what.mark} ${what.text}`.trim(), { "data-level": what.level });
  }

  function bar(share, promised) {
    const box = node("span", null, { class: "bar", "aria-hidden": "true" });
    const put = (width, name) => {
      const fill = node("i", null, name ? { class: name } : {});
      fill.style.width = `${100 * Math.min(1, Math.max(0, width))}%`;
      box.append(fill);
    };
    if (promised !== undefined) put(promised, "promised");
    put(share);
    return box;
  }

  function spark(values, top, label, limit) {
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "0 -1 90 26");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", label);
    const add = (tag, attributes) => {
      const part = document.createElementNS(SVG, tag);
      for (const [name, value] of Object.entries(attributes)) part.setAttribute(name, value);
      svg.append(part);
    };
    if (limit !== undefined && top > 0) {
      const y = 24 - (24 * limit) / top;
      add("line", { x1: 0, x2: 90, y1: y, y2: y });
    }
    add("polyline", { points: View.spark(values, top, 90, 24) });
    return svg;
  }

  function replicaRow(r, slowest) {
    if (r.is_silent) {
      return node("tr", null, {}, [
        node("td", View.short(r.name)),
        node("td", r.phase),
        node("td", r.error ?? "it has not reported yet", { colspan: 7, class: "wrap" }),
      ]);
    }
    const capacity = Math.max(1, r.kv_capacity_tokens);
    const ahead = r.forecast.map((p) => p.tokens);
    const steps = r.forecast.map((p) => p.step_s);
    const until = r.forecast.length ? View.seconds(r.forecast[r.forecast.length - 1].ahead_s) : "";
    const top = 1.05 * Math.max(capacity, ...ahead);
    const paused = r.num_paused ? `, ${r.num_paused} paused` : "";
    const waiting = r.num_waiting - r.num_paused;
    return node("tr", null, {}, [
      node("td", View.short(r.name), { title: r.name }),
      node("td", r.phase),
      node("td", null, {}, [
        bar(r.num_running / Math.max(1, r.num_slots)),
        `${r.num_running} of ${r.num_slots}${waiting ? ` + ${waiting}` : ""}${paused}`,
      ]),
      node("td", null, {}, [
        bar(r.used_tokens / capacity, r.reserved_tokens / capacity),
        `${View.percent(r.used_tokens / capacity)} of ${View.count(capacity)}`,
      ]),
      node("td", null, {}, ahead.length ? [spark(ahead, top, `KV tokens over the next ${until}`, capacity)] : ["–"]),
      node("td", null, {}, steps.length ? [spark(steps, slowest, `step time over the next ${until}`)] : ["–"]),
      node("td", null, {}, [marked(View.urgency(r))]),
      node("td", View.seconds(r.step_s || null), { class: "n" }),
      node("td", View.count(r.tokens_per_s), { class: "n" }),
    ]);
  }

  function showReplicas(view) {
    const slowest = 1.05 * Math.max(0, ...(view.replicas ?? []).flatMap((r) => r.forecast.map((p) => p.step_s)));
    const rows = View.classes(view).flatMap((c) => [
      node("tr", null, { class: "group" }, [node("th", c.name, { colspan: 9, scope: "colgroup" })]),
      ...c.replicas.map((r) => replicaRow(r, slowest)),
    ]);
    at("replicas").replaceChildren(...rows);
  }

  function showExits(view) {
    const before = past[0];
    const isSpan = before !== undefined && before !== view;
    at("exits-span").textContent = isSpan
      ? `tokens of the last ${Math.round(view.at_unix_s - before.at_unix_s)} s`
      : "tokens since the start";
    const blocks = View.exits(view, isSpan ? before : undefined).map((c) =>
      node("div", null, {}, [
        node("h3", c.name),
        ...c.bars.map((b) =>
          node("div", null, { class: "exit" }, [
            node("span", `${b.layer} layers`),
            bar(b.share),
            node("span", `${View.percent(b.share)} · ${View.count(b.tokens)}`),
          ]),
        ),
        node(
          "p",
          `mean depth ${c.mean_depth === null ? "–" : c.mean_depth.toFixed(1)} · below their threshold ${View.count(c.breaches)} (${View.percent(c.breach_share)}) · carried on with their batch ${View.count(c.involuntary_stays)} · pushed out early ${View.count(c.involuntary_exits)}`,
          { class: "hint" },
        ),
      ]),
    );
    at("exits").replaceChildren(...(blocks.length ? blocks : [node("p", "No tokens have been counted yet.", { class: "hint" })]));
  }

  function showMoves(view) {
    const rows = View.moves(view).map((m) =>
      node("tr", null, {}, [
        node("td", m.ago, { class: "n" }),
        node("td", m.sequence, { title: m.sequence_id }),
        node("td", `${m.from} → ${m.to}`),
        node("td", m.cause),
        node("td", m.why, { class: "wrap" }),
        node("td", null, { class: "wrap" }, [marked(m.result)]),
      ]),
    );
    if (!rows.length) rows.push(node("tr", null, {}, [node("td", "No request has moved yet.", { colspan: 6 })]));
    at("moves").replaceChildren(...rows);
  }

  function showHelios(view) {
    const it = View.helios(view);
    at("helios").hidden = it === null;
    at("helios-off").hidden = it !== null;
    if (it === null) return;
    at("helios-facts").replaceChildren(...facts(it.facts));
    at("history").replaceChildren(
      ...it.rows.map((row) => node("tr", null, {}, row.map((text, i) => node("td", text, i ? { class: "n" } : {})))),
    );
    at("helios-decisions").replaceChildren(...it.decisions.flatMap((d) => [node("dt", `${d.ago} ago`), node("dd", d.text)]));
  }

  function show(view) {
    past.push(view);
    while (past.length > 1 && view.at_unix_s - past[0].at_unix_s > SPAN_S) past.shift();
    at("summary").replaceChildren(...facts(View.summary(view)));
    at("troubles").replaceChildren(...View.troubles(view).map((line) => node("li", line)));
    at("decisions").replaceChildren(...View.decisions(view).flatMap((d) => [node("dt", d.subject), node("dd", d.text)]));
    showReplicas(view);
    showExits(view);
    showMoves(view);
    showHelios(view);
  }

  function say(text, level) {
    const state = at("state");
    if (state.textContent !== text) state.textContent = text;
    state.dataset.level = level;
    document.body.classList.toggle("stale", level === "bad");
  }

  async function ask() {
    const key = sessionStorage.getItem(KEY_NAME);
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    const reply = await fetch("/cluster", { headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    const answer = await reply.json();
    if (reply.status === 401 || reply.status === 403) at("login").hidden = false;
    if (!reply.ok) throw new Error(answer.error?.message ?? `status ${reply.status}`);
    at("login").hidden = true;
    return answer;
  }

  async function turn() {
    if (!isPaused && !document.hidden) {
      try {
        show(await ask());
        answeredMs = Date.now();
        if (!isPaused) say("● live", "good");
      } catch (error) {
        const since = answeredMs ? `, last heard of ${View.seconds((Date.now() - answeredMs) / 1000)} ago` : "";
        say(`■ ${error.message}${since}`, "bad");
      }
    }
    setTimeout(turn, EVERY_MS);
  }

  function toggle() {
    isPaused = !isPaused;
    at("pause").setAttribute("aria-pressed", String(isPaused));
    at("pause").textContent = isPaused ? "Go on" : "Pause";
    if (isPaused) say("▲ paused", "warn");
  }

  at("pause").addEventListener("click", toggle);
  document.addEventListener("keydown", (event) => {
    if (event.key === " " && event.target === document.body) {
      event.preventDefault();
      toggle();
    }
  });
  at("login").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY_NAME, at("key").value);
    at("key").value = "";
  });
  turn();
})();
