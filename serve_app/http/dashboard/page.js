"use strict";
/* Asks /cluster once a second and shows what View, Exits and Charts make of it. */

(() => {
  const EVERY_MS = 1000;
  const TIMEOUT_MS = 5000;
  const SPAN_S = 10;
  const KEY_NAME = "quadriga-admin-key";
  const HISTORY = ["class", "requests", "TTFT", "TPOT", "tokens/s", "perplexity", "breaches", "J/token"];
  const { node, facts, marked, bar, spark } = Draw;

  const at = (id) => document.getElementById(id);
  const past = []; // views of the last SPAN_S seconds, for rates
  const opened = new Set(); // classes of which every replica is listed
  let charts = null; // what is drawn
  let pointAt = null; // the point that is looked at; the newest where none is
  let isPaused = false;
  let isAsking = false;
  let isRefused = false; // until another key is given
  let answeredMs = 0;
  let timer = 0;

  function cell(label, children, attributes = {}) {
    return node("td", null, { "data-label": label, ...attributes }, children);
  }

  function replicaRow(r, slowest, hasForecast) {
    if (r.is_silent) {
      return node("tr", null, {}, [
        node("th", View.short(r.name), { title: r.name, scope: "row" }),
        cell("phase", [r.phase]),
        cell("", [r.text], { colspan: hasForecast ? 7 : 4, class: "wrap" }),
      ]);
    }
    const capacity = Math.max(1, r.kv_capacity_tokens);
    const ahead = r.forecast.map((p) => p.tokens);
    const steps = r.forecast.map((p) => p.step_s);
    const old = View.age(r);
    const until = r.forecast.length ? View.seconds(r.forecast[r.forecast.length - 1].ahead_s) : "";
    const top = 1.05 * Math.max(capacity, ...ahead);
    const paused = r.num_paused ? `, ${r.num_paused} paused` : "";
    const cached = r.cached_share ? `; ${View.percent(r.cached_share)} of prompts shared` : "";
    const waiting = r.num_waiting - r.num_paused;
    const range = (values, form) => `${form(values[0])} now, ${form(Math.max(...values))} at most`;
    const future = !hasForecast
      ? []
      : ahead.length
        ? [
            cell("KV ahead", [spark(ahead, top, `KV tokens over the next ${until}: ${range(ahead, View.count)}`, capacity)]),
            cell("step ahead", [spark(steps, slowest, `step time over the next ${until}: ${range(steps, View.seconds)}`)]),
            cell("full in", [old === null ? marked(View.urgency(r)) : "–"]),
          ]
        : [cell("", [View.urgency(r).text], { colspan: 3, class: View.decodes(r) ? "" : "none" })];
    return node("tr", null, old === null ? {} : { class: "old" }, [
      node("th", View.short(r.name), { title: r.name, scope: "row" }),
      cell("phase", [old === null ? r.phase : marked(old)]),
      cell("sequences", [
        bar(r.num_running / Math.max(1, r.num_slots)),
        `${r.num_running} of ${r.num_slots}${waiting ? `, ${waiting} waiting` : ""}${paused}`,
      ]),
      cell("KV memory", [
        bar(r.used_tokens / capacity, r.reserved_tokens / capacity),
        `${View.percent(r.used_tokens / capacity)} of ${View.count(capacity)}${cached}`,
      ]),
      ...future,
      cell("step", [View.seconds(r.step_s || null)], { class: "n" }),
      cell("tokens/s", [View.count(r.tokens_per_s)], { class: "n" }),
    ]);
  }

  function classRow(group, isMany, hasForecast) {
    const title = node("th", `${group.name} `, { colspan: hasForecast ? 9 : 6, scope: "colgroup" }, [node("small", group.text)]);
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
    const hasForecast = View.hasForecast(view);
    at("replicas").parentElement.classList.toggle("present", !hasForecast);
    at("hint-ahead").hidden = !hasForecast;
    const rows = groups.flatMap((g) => [
      classRow(g, isMany, hasForecast),
      ...g.shown.map((r) => replicaRow(r, slowest, hasForecast)),
    ]);
    if (!rows.length) {
      const text = wanted ? `No replica is called like “${wanted}”.` : "No replica has reported yet.";
      rows.push(node("tr", null, {}, [node("td", text, { colspan: 9 })]));
    }
    const focused = document.activeElement?.dataset?.class;
    at("replicas").replaceChildren(...rows);
    if (focused === undefined) return;
    [...at("replicas").querySelectorAll("button")].find((b) => b.dataset.class === focused)?.focus();
  }

  function exitRow(b) {
    if (b.why) return node("div", null, { class: "exit" }, [node("span", `${b.layer} layers`), node("em", b.why)]);
    return node("div", null, { class: "exit" }, [
      node("span", `${b.layer} layers`),
      bar(b.share),
      node("span", `${View.percent(b.share)} · ${View.count(b.tokens)}`),
    ]);
  }

  function depthRow(d) {
    return node("div", null, { class: "exit" }, [
      node("span", `${d.expected.toFixed(1)} ahead`, { title: "layers a token that were expected" }),
      bar(d.share),
      node("span", `ran ${d.run.toFixed(1)} · ${View.count(d.tokens)}`),
    ]);
  }

  /** Of the last seconds, or since the start where no token came in them; says if there is any. */
  function showExits(view) {
    const before = past[0];
    const recent = before !== undefined && before !== view ? Exits.byClass(view, before) : [];
    const isRecent = recent.some((c) => c.total);
    const classes = isRecent ? recent : Exits.byClass(view);
    at("exits-span").textContent = isRecent
      ? `tokens of the last ${Math.round(view.at_unix_s - before.at_unix_s)} s`
      : "tokens since the start";
    const blocks = classes.map((c) =>
      node("div", null, {}, [node("h3", c.name), ...c.bars.map(exitRow), node("p", Exits.notes(c), { class: "hint" }), ...c.depths.map(depthRow)]),
    );
    at("exits").replaceChildren(...blocks);
    at("exits-panel").hidden = !blocks.length;
    return blocks.length > 0;
  }

  function showCharts(view) {
    charts = Charts.all(view);
    at("charts-panel").hidden = charts === null;
    if (charts === null) return;
    const places = at("charts");
    if (places.children.length !== charts.length) places.replaceChildren(...charts.map(Draw.figure));
    drawCharts();
  }

  function drawCharts() {
    if (charts === null) return;
    const newest = charts[0].num_points - 1;
    at("charts-at").textContent = pointAt === null || pointAt === newest ? "" : Charts.pointAge(charts[0], pointAt);
    charts.forEach((data, k) => Draw.chart(at("charts").children[k], data, pointAt));
  }

  function placeRow(place) {
    return node("div", null, { class: "place" }, [node("span", place.name), bar(place.share), node("span", place.text)]);
  }

  function showRequests(view) {
    const columns = ["model", "replica", "status", "for", "tokens", "predicted", "to go", "so far"];
    const rows = View.requests(view).map((r) =>
      node("tr", null, {}, [
        node("th", r.name, { title: r.request_id, scope: "row" }),
        ...columns.map((name) => cell(name, [r[name]], ["for", "tokens"].includes(name) ? { class: "n" } : {})),
      ]),
    );
    const none = view.requests ? "No request runs now." : "The controller, which knows them, does not answer.";
    if (!rows.length) rows.push(node("tr", null, {}, [node("td", none, { colspan: 9 })]));
    at("requests").replaceChildren(...rows);
  }

  function showMoves(view) {
    const rows = View.moves(view).map((m) =>
      node("tr", null, {}, [
        cell("ago", [m.ago], { class: "n" }),
        cell("sequence", [m.sequence], { title: m.sequence_id }),
        cell("way", [`${m.from} → ${m.to}`]),
        cell("cause", [m.cause]),
        cell("why", [node("div", m.why, {}, m.places.map(placeRow))], { class: "wrap" }),
        cell("came to", [marked(m.result)], { class: "wrap" }),
      ]),
    );
    at("moves-panel").hidden = !rows.length;
    at("moves").replaceChildren(...rows);
  }

  function showHelios(view) {
    const it = View.helios(view);
    at("helios-panel").hidden = it === null;
    if (it === null) return;
    at("helios-facts").replaceChildren(...facts(it.facts));
    at("history").replaceChildren(
      ...it.rows.map((row) => node("tr", null, {}, row.map((text, i) => cell(HISTORY[i], [text], i ? { class: "n" } : {})))),
    );
    at("helios-barred").replaceChildren(...it.barred.map((line) => node("li", line)));
    if (!it.rows.length) at("history").append(node("tr", null, {}, [node("td", "Nothing has been measured yet.", { colspan: 8 })]));
    at("helios-decisions").replaceChildren(...it.decisions.flatMap((d) => [node("dt", `${d.ago} ago`), node("dd", d.text)]));
  }

  function show(view) {
    past.push(view);
    while (past.length > 1 && Math.abs(view.at_unix_s - past[0].at_unix_s) > SPAN_S) past.shift();
    at("summary").replaceChildren(...facts(View.summary(view)));
    const troubles = View.troubles(view).map((line) => node("li", line));
    if (at("troubles").textContent !== troubles.map((line) => line.textContent).join("")) {
      at("troubles").replaceChildren(...troubles); // it is read aloud when it changes
    }
    const decisions = View.decisions(view);
    at("decisions").replaceChildren(...decisions.flatMap((d) => [node("dt", d.subject), node("dd", d.text)]));
    at("decisions-panel").hidden = !decisions.length;
    showCharts(view);
    showReplicas(view);
    showRequests(view);
    const hasExits = showExits(view);
    showMoves(view);
    showHelios(view);
    const quiet = View.quiet(view, charts !== null, hasExits);
    at("quiet-panel").hidden = !quiet.length;
    at("quiet").replaceChildren(
      ...quiet.map((q) => node("li", null, {}, [node("b", `${q.subject}: `), `${q.text} `, ...(q.setting ? [node("code", q.setting), "."] : [])])),
    );
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
    const answer = await reply.json().catch(() => null);
    if (reply.status === 401 || reply.status === 403) askForKey();
    if (!reply.ok) throw new Error(answer?.error?.message ?? `status ${reply.status}`);
    if (answer === null) throw new Error("the answer was cut off, or is no answer of ours");
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
  at("charts").addEventListener("pointermove", (event) => {
    const place = event.target.closest?.(".plot");
    if (!place || charts === null) return;
    pointAt = Draw.pointed(place, event.clientX, charts[0].num_points);
    drawCharts();
  });
  at("charts").addEventListener("pointerleave", () => {
    pointAt = null;
    drawCharts();
  });
  window.addEventListener("resize", drawCharts);
  document.addEventListener("visibilitychange", () => document.hidden || turn());
  turn();
})();
