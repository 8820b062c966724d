"""The relay batch: any unmodified Hugging Face decoder with a plain K/V cache, as a `ModelRunner`.

    loading      config.json and safetensors → a `transformers` model, or the reason why not
    probe        what its cache holds, and whether padded and unpadded passes agree
    model        one forward call, whatever the family's signature
    row_kv       one sequence's K/V outside the batch: being filled, sitting out, or suspended
    dense        the running batch: dense K/V, end-aligned, padded and released in front
    prompts      prefill passes: prompts of similar length together
    passes       one prompt pass and one decode step, over a `transformers` cache of the above
    rows         which row's K/V is where: joining, leaving, suspension; memory figures
    runner       the `ModelRunner`: samplers, chunks, steps

Source: BATON §4.1 (vector shaping, release), §4.2 (embedding prefilled K/V), §4.3 (preemption).
"""
