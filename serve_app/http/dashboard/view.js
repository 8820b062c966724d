"use strict";
/* What the page says, made from the answer of /cluster. Pure functions: no document, no network,
   no clock; page.js puts their results on the screen, and tests run them without a browser. */

const View = (() => {
  const SOON_S = 60;
  const VERY_SOON_S = 15;
  const SHOWN_CHOICES = 12;
  const OLD_S = 5;
  const FEW = 40;

  /** A replica's role and number; the end of a sequence's id. */
  function short(name) {
    const parts = String(name).split(":");
    return parts.length === 4 ? `${parts[1]} ${parts[2]}` : String(name).slice(-12);
  }

  function percent(share) {
    return share === null || !isFinite(share) ? "–" : `${Math.round(100 * share)} %`;
  }

  /** A count in at most four figures. */
  function count(value) {
    if (value === null || value === undefined || !isFinite(value)) return "–";
    const size = Math.abs(value);
    if (size >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
    if (size >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
    if (size >= 1e4) return `${(value / 1e3).toFixed(0)} k`;
    return size >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1);
  }

  function seconds(value) {
    if (value === null || value === undefined || !isFinite(value)) return "–";
    if (value < 1) return `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms`;
    if (value < 120) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
    return value < 7200 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`;
  }

  /** Whether sequences decode at a replica: mixed ones do both parts of the work. */
  function decodes(replica) {
    return replica.role !== "prefill";
  }

  /** How near a replica's memory is to its end: a level, a mark that needs no colour, words. */
  function urgency(replica) {
    if (!decodes(replica)) return { level: "none", mark: "", text: "" };
    if (!replica.forecast.length) return { level: "none", mark: "", text: "no forecast" };
    const left = replica.seconds_to_full;
    if (left === null) return { level: "good", mark: "●", text: "not in sight" };
    if (left >= SOON_S) return { level: "good", mark: "●", text: seconds(left) };
    if (left >= VERY_SOON_S) return { level: "warn", mark: "▲", text: seconds(left) };
    return { level: "bad", mark: "■", text: seconds(left) };
  }

  /** How old a replica's figures are, where they are too old to be believed; else null. */
  function age(replica) {
    if (!(replica.age_s > OLD_S)) return null;
    return { level: "bad", mark: "■", text: `silent for ${seconds(replica.age_s)}` };
  }

  /** Whether a replica's figures are of now, so that sums may hold them. */
  function isHeard(replica) {
    return !replica.is_silent && age(replica) === null;
  }

  /** Whether somebody should look at a replica; in large clusters only these are listed. */
  function isNotable(replica) {
    if (!isHeard(replica) || !["ready", "–"].includes(replica.phase)) return true;
    return replica.num_paused > 0 || ["warn", "bad"].includes(urgency(replica).level);
  }

  /** A class in a line: its replicas and what they do together. */
  function together(replicas) {
    const decode = replicas.filter((r) => isHeard(r) && decodes(r));
    const sum = (of) => decode.reduce((all, r) => all + of(r), 0);
    const parts = [replicas.length === 1 ? "1 replica" : `${replicas.length} replicas`];
    if (decode.length) {
      const share = sum((r) => r.used_tokens) / Math.max(1, sum((r) => r.kv_capacity_tokens));
      parts.push(`${count(sum((r) => r.num_running))} of ${count(sum((r) => r.num_slots))} sequences`);
      parts.push(`KV memory ${percent(share)}`, `${count(sum((r) => r.tokens_per_s))} tokens/s`);
    }
    return parts.join(" · ");
  }

  /**
   * What of `classes` is listed: of few replicas all, of many those that need a look, of the
   * classes in `opened` all; and none but those whose name, class or phase holds `wanted`.
   */
  function listed(view, opened, wanted) {
    const all = classes(view);
    const isMany = all.reduce((sum, c) => sum + c.replicas.length, 0) > FEW;
    const words = String(wanted).toLowerCase().split(/\s+/).filter(Boolean);
    const isWanted = (c, r) => {
      const text = `${r.name} ${short(r.name)} ${c.name} ${r.phase}`.toLowerCase();
      return words.every((word) => text.includes(word));
    };
    const groups = all.map((c) => {
      const isOpen = !isMany || words.length > 0 || opened.includes(c.name);
      const found = c.replicas.filter((r) => isWanted(c, r));
      const shown = found.filter((r) => isOpen || isNotable(r));
      return { name: c.name, text: together(c.replicas), shown, isOpen, num_hidden: found.length - shown.length };
    });
    return { isMany, groups: words.length ? groups.filter((g) => g.shown.length) : groups };
  }

  /** Replicas by depth class, decode before prefill; those that have not reported yet included. */
  function classes(view) {
    const phases = new Map((view.fleet?.replicas ?? []).map((r) => [r.name, r]));
    const found = new Map();
    const put = (name, replica) => {
      if (!found.has(name)) found.set(name, []);
      found.get(name).push(replica);
    };
    for (const replica of view.replicas ?? []) {
      const known = phases.get(replica.name);
      phases.delete(replica.name);
      const phase = replica.is_draining ? "draining" : (known?.phase ?? (view.fleet ? "not in the fleet" : "–"));
      put(replica.depth_class, { ...replica, phase, is_silent: false });
    }
    for (const member of phases.values()) {
      const text = member.error ?? (member.doing || (view.mode ? "it has not reported yet" : "its load is not known: the scheduler does not answer"));
      put(member.depth_class ?? "not loaded yet", { ...member, text, is_silent: true });
    }
    const numbered = (name) => name.replace(/\d+/g, (digits) => digits.padStart(8, "0"));
    const order = (r) => `${decodes(r) ? 0 : 1} ${numbered(r.name)}`;
    return [...found.entries()]
      .sort(([a], [b]) => (a < b ? -1 : 1))
      .map(([name, replicas]) => ({
        name,
        replicas: replicas.sort((a, b) => (order(a) < order(b) ? -1 : 1)),
      }));
  }

  /** Points of a sparkline in a box, "x,y x,y …"; `top` is the value at the upper edge. */
  function spark(values, top, width, height) {
    if (values.length < 2 || !(top > 0)) return "";
    return values
      .map((value, i) => {
        const x = (i * width) / (values.length - 1);
        const y = height - Math.min(1, Math.max(0, value / top)) * height;
        return `${x.toFixed(1)},${y.toFixed(1)}`;
      })
      .join(" ");
  }

  /** Whether some decode replica forecasts: only then there is something to show of the future. */
  function hasForecast(view) {
    return (view.replicas ?? []).some((r) => r.forecast.length > 0);
  }

  /**
   * What has nothing to show, each with the reason in a line.
   *
   * `hasCharts`, `hasExits`: whether those of the page's parts are shown that others make.
   */
  function quiet(view, hasCharts, hasExits) {
    const lines = [];
    const say = (subject, text, setting) => lines.push({ subject, text, setting: setting ?? "" });
    if (!hasCharts) {
      const known = "no request in the last ten minutes; they appear with the first tokens.";
      say("Charts", view.load_history ? known : "the controller, which keeps them, does not answer.");
    }
    if (!hasExits) {
      const known = "no decode replica has told of its exits yet.";
      say("Exits", view.exits && view.mode ? known : "the controller or the scheduler does not answer.");
    }
    const decode = (view.replicas ?? []).filter(decodes);
    const perClass = new Map();
    for (const r of decode) perClass.set(r.depth_class, (perClass.get(r.depth_class) ?? 0) + 1);
    const hasCompany = [...perClass.values()].some((n) => n > 1);
    const isOff = view.mode === "off";
    if (view.mode === undefined) {
      say("Moves", "the scheduler, which orders them, does not answer.");
    } else if (!(view.recent ?? []).length) {
      if (isOff) {
        const what = hasForecast(view) ? "no moves yet" : "no moves yet, no forecasts";
        say("Moves", `${what}: rescheduling is off, turn it on with`, "scheduler.ares.mode=ares");
      } else if (!hasCompany) {
        say("Moves", "no moves yet: no class has two decode replicas, so there is nowhere to move to.");
      } else {
        say("Moves", `no moves yet: rescheduling is on (${view.mode}) and nothing was worth a move.`);
      }
    } else if (isOff && !hasForecast(view)) {
      say("Forecasts", "none: rescheduling is off, turn it on with", "scheduler.ares.mode=ares");
    }
    if (view.helios === undefined) {
      say("Choice of model and depth", "the controller, which chooses, does not answer.");
    } else if (view.helios === null) {
      say("Choice of model and depth", "HELIOS is off: every model is served as configured. Turn it on with", "helios.enabled=true");
    }
    return lines;
  }

  /** Why a sequence was told to move, in a sentence. */
  function why(move) {
    const from = short(move.source);
    const to = short(move.destination);
    const ahead = move.remaining_tokens
      ? `about ${count(move.remaining_tokens)} tokens still to come`
      : "how long it will run is not known";
    const size = `${count(move.num_tokens)} tokens to carry, ${ahead}`;
    if (move.cause === "balance") {
      return `${from} was busier than ${to}; the move takes away ${percent(move.gain)} of the imbalance between their class's replicas (${size}).`;
    }
    if (move.cause === "memory") {
      const soon = move.explanation?.full_s;
      const when = soon === null || soon === undefined ? "" : ` in ${seconds(soon)}`;
      return `The memory of ${from} was forecast to fill${when}; ${to} has room (${size}).`;
    }
    if (move.cause === "escalate") return `It is strict, and ${from} lacks layers that it needs; ${to} has them (${size}).`;
    if (move.cause === "depth") {
      return `${to} runs sequences of about its depth; apart, tokens take ${percent(move.gain)} less time by the model (${size}).`;
    }
    if (move.cause === "drain") return `${from} is being emptied${move.reason ? `: ${move.reason}` : ""} (${size}).`;
    return `${move.cause} (${size}).`;
  }

  /** What came of a move; `level` and `mark` as for `urgency`. */
  function result(move) {
    const report = move.report;
    if (report === null) return { level: "warn", mark: "→", text: "under way" };
    const reason = report.reason ? `: ${report.reason}` : "";
    if (report.outcome === "moved") {
      return { level: "good", mark: "✓", text: `moved, at rest for ${seconds(report.stall_s)}` };
    }
    if (report.outcome === "finished") return { level: "none", mark: "·", text: `it ended first${reason}` };
    const level = report.outcome === "refused" ? "warn" : "bad";
    return { level, mark: level === "bad" ? "■" : "▲", text: `${report.outcome}${reason}` };
  }

  /** Where a move might have gone, the chosen replica first: the memory there ahead, and words. */
  function places(move) {
    return (move.explanation?.destinations ?? []).map((place, k) => ({
      name: `${k ? "" : "→ "}${short(place.name)}`,
      share: place.memory_share,
      text: `KV ahead ${percent(place.memory_share)} · work ${place.work.toFixed(2)} → ${place.work_after.toFixed(2)} · imbalance ${percent(-place.gain)}`,
    }));
  }

  /** Moves, the newest first. */
  function moves(view) {
    return [...(view.recent ?? [])].reverse().map((move) => ({
      key: `${move.sequence_id} ${move.at_unix_s}`,
      ago: seconds(Math.max(0, view.at_unix_s - move.at_unix_s)),
      sequence: short(move.sequence_id),
      sequence_id: move.sequence_id,
      from: short(move.source),
      to: short(move.destination),
      cause: move.cause,
      why: why(move),
      places: places(move),
      result: result(move),
    }));
  }

  /** Sequences of running requests by the table's columns, the longest running first. */
  function requests(view) {
    return (view.requests ?? []).map((r) => {
      const whole = (left) => count(Math.round(r.tokens + left));
      const { eta } = r;
      return {
        ...r,
        name: short(r.request_id) + (r.choice ? ` #${r.choice}` : ""),
        replica: r.replica === null ? "–" : short(r.replica),
        for: seconds(r.running_s),
        tokens: count(r.tokens),
        predicted: eta ? `${whole(eta.tokens)} (${whole(eta.lower)} to ${whole(eta.upper)})` : "–",
        "to go": eta?.seconds === undefined ? "–" : `${seconds(eta.seconds)} (up to ${seconds(eta.upper_seconds)})`,
        "so far": ["migrations", "pauses", "rebuilds", "breaches"].filter((k) => r[k]).map((k) => `${k} ${count(r[k])}`).join(", "),
      };
    });
  }

  /** Figures of the head line. */
  function summary(view) {
    const replicas = (view.replicas ?? []).filter(isHeard);
    const decode = replicas.filter(decodes);
    const sum = (of, list) => (view.mode ? list.reduce((all, r) => all + of(r), 0) : null);
    const fleet = view.fleet;
    const moving = (view.under_way ?? []).length;
    return [
      ["replicas ready", fleet ? `${fleet.num_ready} of ${fleet.num_desired}` : "–"],
      ["running", count(sum((r) => r.num_running, decode))],
      ["waiting", count(sum((r) => r.num_waiting, replicas))],
      ["tokens/s", count(sum((r) => r.tokens_per_s, decode))],
      ...(moving ? [["moving", count(moving)]] : []),
      ["rescheduling", view.mode ?? "–"],
      ["placement", view.placement ?? "–"],
    ];
  }

  /** Lines of trouble that no table shows. */
  function troubles(view) {
    const lines = Object.entries(view.missing ?? {}).map(([name, text]) => `${name} does not answer: ${text}`);
    const fleet = view.fleet, waits = new Set();
    if (fleet?.error) lines.push(`the configuration cannot be brought about: ${fleet.error}`);
    if (fleet?.last_failure && !fleet.is_ready) lines.push(`the last replica lost: ${fleet.last_failure}`);
    // Without the seconds, which the table has: these lines are read aloud whenever they change.
    const old = (view.replicas ?? []).filter((r) => age(r) !== null);
    if (old.length > 3) lines.push(`${old.length} replicas have not reported for more than ${OLD_S} s`);
    else for (const r of old) lines.push(`${short(r.name)} has not reported for more than ${OLD_S} s`);
    for (const replica of fleet?.replicas ?? []) {
      if (replica.error) lines.push(`${short(replica.name)}: ${replica.error}`);
      else if (replica.doing && replica.phase === "ready") waits.add(`the roll-out waits: ${replica.doing}`);
    }
    lines.push(...waits);
    for (const [model, length] of Object.entries(view.lengths ?? {})) {
      if (length.is_distrusted) lines.push(`${model}: length predictions do not hold; the present load decides`);
    }
    return lines;
  }

  /** What the last look at each class decided, and how good predictions are. */
  function decisions(view) {
    const lines = Object.entries(view.last_tick?.why ?? {})
      .sort()
      .map(([name, text]) => ({ subject: name, text }));
    for (const [model, length] of Object.entries(view.lengths ?? {}).sort()) {
      lines.push({
        subject: model,
        text: `${percent(length.coverage)} of lengths inside their predicted range (80 % is right), mean error ${count(length.mean_error_tokens)} tokens, of ${count(length.num_ended)} ended`,
      });
    }
    return lines;
  }

  /** HELIOS: null where it is off; else its state, CBC, rows of its history, last decisions. */
  function helios(view) {
    const it = view.helios;
    if (!it) return null;
    const { breaches, tokens } = it.window;
    const happened = Object.entries(it.counters).filter(([, n]) => n > 0);
    return {
      facts: [
        ["goal", it.slo],
        ["phase", it.phase],
        ["serves", it.serve.join(", ") || "–"],
        ["target", it.target ?? "–"],
        ["profiling", it.profiling ?? "–"],
        ["under way", it.order ?? "–"],
        ["CBC", `${count(breaches)} of ${count(tokens)} tokens (${percent(tokens ? breaches / tokens : null)})`],
        ["so far", happened.map(([kind, n]) => `${n} ${kind}`).join(", ") || "–"],
      ],
      barred: Object.entries(it.barred).map(([name, reason]) => `${name}: ${reason}`),
      rows: it.rows.map((row) => [
        `${row.model}@${row.depth}`,
        count(row.requests),
        seconds(row.ttft_s),
        seconds(row.tpot_s),
        count(row.tokens_per_s),
        row.perplexity === null || row.perplexity === undefined ? "–" : row.perplexity.toFixed(2),
        percent(row.breach_share ?? null),
        row.joules_per_token === null || row.joules_per_token === undefined ? "–" : row.joules_per_token.toPrecision(3),
      ]),
      decisions: [...it.decisions].reverse().slice(0, SHOWN_CHOICES).map((d) => {
        const { at_unix_s, what, depth_class, reason, ...rest } = d;
        const more = Object.entries(rest).filter(([, value]) => value !== null && value !== "");
        return {
          ago: seconds(Math.max(0, view.at_unix_s - at_unix_s)),
          text: [what, depth_class, reason, ...more.map(([k, v]) => `${k} ${v}`)].filter(Boolean).join(" · "),
        };
      }),
    };
  }

  return { short, percent, count, seconds, urgency, decodes, age, isNotable, listed, classes, spark, hasForecast, quiet, why, result, moves, requests, summary, troubles, decisions, helios };
})();
