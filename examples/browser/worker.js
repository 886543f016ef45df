// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
/** The thread in which models compute, while the page stays alive. */

import { load } from "./model.js";
import { race } from "./race.js";

let models = [];
let isStopped = false;

const TASKS = {
  async load({ folders }) {
    models = await Promise.all(folders.map(load));
    postMessage({ kind: "loaded" });
  },
  async race(settings) {
    isStopped = false;
    const show = (standings) => postMessage({ kind: "standings", standings });
    try {
      await race(models, settings, show, () => isStopped);
    } finally {
      postMessage({ kind: "over" });
    }
  },
  async stop() {
    isStopped = true;
  },
};

onmessage = ({ data: { kind, ...settings } }) =>
  TASKS[kind](settings).catch((error) =>
    postMessage({ kind: "failed", text: String(error.message ?? error) }),
  );
