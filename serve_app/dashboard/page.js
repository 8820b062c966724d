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
  const opened = new Set(); // classes of which every replica is listed
  let isPaused = false;
  let isAsking = false;
  let isRefused = false; // until another key is given
  let answeredMs = 0;
  let timer = 0;

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
        node("th", View.short(r.name), { title: r.name, scope: "row" }),
        node("td", r.phase),
        node("td", r.error ?? "it has not reported yet", { colspan: 7, class: "wrap" }),
      ]);
    }
    const capacity = Math.max(1, r.kv_capacity_tokens);
    const ahead = r.forecast.map((p) => p.tokens);
    const steps = r.forecast.map((p) => p.step_s);
    const old = View.age(r);
    const until = r.forecast.length ? View.seconds(r.forecast[r.forecast.length - 1].ahead_s) : "";
    const top = 1.05 * Math.max(capacity, ...ahead);
    const paused = r.num_paused ? `, ${r.num_paused} paused` : "";
    const waiting = r.num_waiting - r.num_paused;
    const range = (values, form) => `${form(values[0])} now, ${form(Math.max(...values))} at most`;
    return node("tr", null, old === null ? {} : { class: "old" }, [
      node("th", View.short(r.name), { title: r.name, scope: "row" }),
      node("td", null, {}, old === null ? [r.phase] : [marked(old)]),
      node("td", null, {}, [
        bar(r.num_running / Math.max(1, r.num_slots)),
        `${r.num_running} of ${r.num_slots}${waiting ? ` + ${waiting}` : ""}${paused}`,
      ]),
      node("td", null, {}, [
        bar(r.used_tokens / capacity, r.reserved_tokens / capacity),
        `${View.percent(r.used_tokens / capacity)} of ${View.count(capacity)}`,
      ]),
      node("td", null, {}, ahead.length ? [spark(ahead, top, `KV tokens over the next ${until}: ${range(ahead, View.count)}`, capacity)] : ["–"]),
      node("td", null, {}, steps.length ? [spark(steps, slowest, `step time over the next ${until}: ${range(steps, View.seconds)}`)] : ["–"]),
      node("td", null, {}, old === null ? [marked(View.urgency(r))] : ["–"]),
      node("td", View.seconds(r.step_s || null), { class: "n" }),
      node("td", View.count(r.tokens_per_s), { class: "n" }),
    ]);
  }

  function classRow(group, isMany) {
    const title = node("th", `${group.name} `, { colspan: 9, scope: "colgroup" }, [node("small", group.text)]);
    if (isMany && (group.num_hidden || opened.has(group.name))) {
      const text = group.isOpen ? "only those that need a look" : `show ${group.num_hidden} more`;
      const button = node("button", text, { type: "button", "aria-expanded": group.isOpen, "data-class": group.name });
      button.setAttribute("aria-label", `${group.name}: ${text}`);
      title.append(" ", button);
    }
    return node("tr", null, { class: "group" }, [title]);
  }

  function showReplicas(view) {
    const slowest = 1.05 * Math.max(0, ...(view.replicas ?? []).flatMap((r) => r.forecast.map((p) => p.step_s)));
    const wanted = at("find").value;
    const { isMany, groups } = View.listed(view, [...opened], wanted);
    at("finding").hidden = !isMany && !wanted;
    const rows = groups.flatMap((g) => [classRow(g, isMany), ...g.shown.map((r) => replicaRow(r, slowest))]);
    if (!rows.length) {
      const text = wanted ? `No replica is called like “${wanted}”.` : "No replica has reported yet.";
      rows.push(node("tr", null, {}, [node("td", text, { colspan: 9 })]));
    }
    const focused = document.activeElement?.dataset?.class;
    at("replicas").replaceChildren(...rows);
    if (focused === undefined) return;
    [...at("replicas").querySelectorAll("button")].find((b) => b.dataset.class === focused)?.focus();
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
    at("helios-barred").replaceChildren(...it.barred.map((line) => node("li", line)));
    if (!it.rows.length) at("history").append(node("tr", null, {}, [node("td", "Nothing has been measured yet.", { colspan: 8 })]));
    at("helios-decisions").replaceChildren(...it.decisions.flatMap((d) => [node("dt", `${d.ago} ago`), node("dd", d.text)]));
  }

  function show(view) {
    past.push(view);
    while (past.length > 1 && view.at_unix_s - past[0].at_unix_s > SPAN_S) past.shift();
    at("summary").replaceChildren(...facts(View.summary(view)));
    const troubles = View.troubles(view).map((line) => node("li", line));
    if (at("troubles").textContent !== troubles.map((line) => line.textContent).join("")) {
      at("troubles").replaceChildren(...troubles); // it is read aloud when it changes
    }
    const decisions = View.decisions(view);
    at("decisions").replaceChildren(...decisions.flatMap((d) => [node("dt", d.subject), node("dd", d.text)]));
    at("decisions-none").hidden = decisions.length > 0;
    showReplicas(view);
    showExits(view);
    showMoves(view);
    showHelios(view);
  }

  function say(text, level) {
    const state = at("state");
    if (state.textContent !== text) state.textContent = text;
    state.dataset.level = level;
    document.body.classList.toggle("stale", level !== "good" && answeredMs > 0);
    document.title = level === "good" ? "Quadriga" : `${text.slice(0, 1)} Quadriga`;
    showAge();
  }

  /** Beside the state, which is read aloud: a number that changes every second is not. */
  function showAge() {
    const isOld = answeredMs > 0 && at("state").dataset.level !== "good";
    at("age").textContent = isOld ? `figures of ${View.seconds((Date.now() - answeredMs) / 1000)} ago` : "";
  }

  async function ask() {
    const key = sessionStorage.getItem(KEY_NAME);
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    let reply;
    try {
      reply = await fetch("/cluster", { headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    } catch (error) {
      throw new Error(error.name === "TimeoutError" ? `no answer within ${TIMEOUT_MS / 1000} s` : "the service does not answer");
    }
    const answer = await reply.json().catch(() => ({}));
    if (reply.status === 401 || reply.status === 403) askForKey();
    if (!reply.ok) throw new Error(answer.error?.message ?? `status ${reply.status}`);
    at("login").hidden = true;
    return answer;
  }

  function askForKey() {
    isRefused = true;
    sessionStorage.removeItem(KEY_NAME);
    at("login").hidden = false;
    at("key").focus();
  }

  /** One question at a time, the next one a second after the answer, whatever that was. */
  async function turn() {
    clearTimeout(timer);
    if (isAsking) return;
    if (!isPaused && !isRefused && !document.hidden) {
      isAsking = true;
      try {
        const view = await ask();
        if (!isPaused) {
          answeredMs = Date.now();
          show(view);
          say("● live", "good");
        }
      } catch (error) {
        const since = answeredMs ? `, last heard of at ${new Date(answeredMs).toLocaleTimeString()}` : "";
        if (!isPaused) say(`■ ${error.message}${since}`, "bad");
      }
      isAsking = false;
    }
    showAge();
    timer = setTimeout(turn, EVERY_MS);
  }

  function toggle() {
    isPaused = !isPaused;
    at("pause").setAttribute("aria-pressed", String(isPaused));
    at("pause").textContent = isPaused ? "Go on" : "Pause";
    if (isPaused) say("▲ paused", "warn");
    else turn();
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
    isRefused = false;
    turn();
  });
  at("replicas").addEventListener("click", (event) => {
    const name = event.target.dataset.class;
    if (name === undefined) return;
    if (!opened.delete(name)) opened.add(name);
    if (past.length) showReplicas(past[past.length - 1]);
  });
  at("find").addEventListener("input", () => past.length && showReplicas(past[past.length - 1]));
  document.addEventListener("visibilitychange", () => document.hidden || turn());
  turn();
})();
