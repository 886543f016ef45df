// Copyright 2026 The hf-linear-attention authors. Licensed under the Apache License, Version 2.0.
/**
 * A folder of `python -m hf_linear_attention export` at work in a browser: an ONNX graph whose
 * states are inputs and outputs, and its tokenizer.
 */

import * as ort from "./lib/ort.wasm.min.mjs";
import { Tokenizer } from "./lib/tokenizers.min.mjs";

ort.env.wasm.numThreads = 1; // more need headers that not every static server sends

/** A model in a folder with weights of float32, or of few bits beside float32. */
export async function load(folder) {
  const json = (name) => file(`${folder}/${name}`).then((response) => response.json());
  const [graph, ...tokenizer] = await Promise.all([
    file(`${folder}/onnx/model.onnx`).then((response) => response.arrayBuffer()),
    json("tokenizer.json"),
    json("tokenizer_config.json"),
  ]);
  const session = await ort.InferenceSession.create(new Uint8Array(graph));
  return new Model(session, new Tokenizer(...tokenizer));
}

async function file(address) {
  const response = await fetch(address, { cache: "no-cache" }); // it may have been exported anew
  if (!response.ok) throw new Error(`${address} is missing (${response.status})`);
  return response;
}

class Model {
  constructor(session, tokenizer) {
    this.session = session;
    this.tokenizer = tokenizer;
    this.past = session.inputMetadata.filter(({ name }) => name.startsWith("past"));
    this.forget();
  }

  /** To the states of a model that has read nothing: zeros, and no keys and values. */
  forget() {
    this.count = 0; // of tokens that were read
    this.states = {};
    for (const { name, shape } of this.past) {
      const sizes = [1, ...shape.slice(1).map((size) => (Number.isInteger(size) ? size : 0))];
      const zeros = new Float32Array(sizes.reduce((product, size) => product * size));
      this.states[name] = new ort.Tensor("float32", zeros, sizes);
    }
  }

  /** Reads tokens, one or many, behind those before: the logits of what follows. */
  async read(tokens) {
    const total = this.count + tokens.length;
    const outputs = await this.session.run({
      input_ids: int64(BigInt64Array.from(tokens, BigInt)),
      position_ids: int64(BigInt64Array.from(tokens, (_, i) => BigInt(this.count + i))),
      attention_mask: int64(ones(total)),
      num_logits_to_keep: new ort.Tensor("int64", [1n], []),
      ...this.states,
    });
    for (const name in this.states) {
      const present = name.replace("past_key_values", "present").replace("past", "present");
      this.states[name] = outputs[present];
    }
    this.count = total;
    return outputs.logits.data.slice();
  }

  /** Of all that the model keeps of what it has read. */
  get stateBytes() {
    const sizes = Object.values(this.states).map((state) => state.size);
    return sizes.reduce((sum, size) => sum + size, 0) * Float32Array.BYTES_PER_ELEMENT;
  }
}

function int64(numbers) {
  return new ort.Tensor("int64", numbers, [1, numbers.length]);
}

let manyOnes = new BigInt64Array();

/** So many, which are made once. */
function ones(count) {
  if (count > manyOnes.length) manyOnes = new BigInt64Array(2 * count).fill(1n);
  return manyOnes.subarray(0, count);
}
