"""onebit-prefill-numpy: a prefill provider that is not llama.cpp; the worked example of one.

    onebit-prefill-numpy --tokens IDS_FILE --out STATE_FILE --model MODEL [--elfs DIR]

It reads a GGUF of the llama, qwen3 or gemma3 architecture, computes the keys and values of a prompt
in float32, and writes them as the decoder wants them. Read it in the order of a run:

    program     the command line, and one run from the ids to the state file
    model_file  tensors of a GGUF as float32, whatever they are quantized to
    shape       what an architecture computes: sizes, norms, rope, windows, from the metadata
    layout      what the decoder's state files look like, and whether this engine can write one
    engine      the layers: the only part that another device would replace
    rope        positions turned into angles, and rows turned by them
    attention   causal attention over the keys so far, a block of queries at a time

Memory: the mapped file, one layer's weights in float32, the hidden state (one row of the model's
width for each token), and the cache itself. The last layer needs no more than its keys and values:
nothing after them reaches the cache.

It computes with exact weights and float32 activations. llama.cpp rounds activations to 8 bits where
weights are quantized, so on a quantized file the two drift apart; on an f32 file they agree to the
rounding of the cache. onebit-provider(7) has the figures and the command that measures them.
"""

from onebitd.prefill_numpy.program import main

__all__ = ["main"]
