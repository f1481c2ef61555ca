#!/usr/bin/env python3
"""What `quern quantize` writes, read by Hugging Face transformers and compressed-tensors.

  quantized_checkpoint_test.py --quern build/quern --model models/quern-demo --calibration-text FILE --text FILE

For every scheme: transformers loads the checkpoint and finds a place for every tensor, its weights are those of the source to half a
quantum of e4m3, and its perplexity on the text is close to the source's. On a machine without a GPU both expand the weights to bfloat16,
so what static and dynamic inputs cost is not seen here.

Exit status 77 (CTest: skipped) when torch, transformers or compressed-tensors are not installed.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
import unittest

try:
    import compressed_tensors  # noqa: F401
    import safetensors
    import torch
    import transformers
except ImportError as error:
    print(f"SKIPPED: {error.name} is not installed (pip install torch transformers accelerate compressed-tensors)", file=sys.stderr)
    sys.exit(77)

ARGS = None
SCHEMES = {"block-fp8": 1.01, "static-fp8": 1.02, "channel-fp8": 1.01}  # the highest ratio to the source's perplexity
NUM_TOKENS = 1024
NOT_IN_TRANSFORMERS = (".k_scale", ".v_scale")  # its caches are not quantized by a checkpoint's scales; servers read them


def tensors_of(folder):
    found = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:
            for name in file.keys():
                found[name] = file.get_tensor(name)
    return found


def dequantized(name, tensors):
    """float32 values of a weight, and its scale for every element."""
    codes = tensors[name]
    if codes.dtype != torch.float8_e4m3fn:
        return codes.float(), None
    module = name.removesuffix(".weight")
    scale = tensors.get(f"{module}.weight_scale_inv", tensors.get(f"{module}.weight_scale")).float()
    rows, columns = codes.shape
    if scale.numel() not in (1, rows):
        scale = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return codes.float() * scale, scale.expand(rows, columns)


def load(folder):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    return model.eval(), info


def perplexity(model, tokens):
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, tokens[1:]).exp().item()


class QuantizedCheckpoint(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.source = tensors_of(ARGS.model)
        tokenizer = transformers.AutoTokenizer.from_pretrained(ARGS.model)
        cls.tokens = torch.tensor(tokenizer(pathlib.Path(ARGS.text).read_text()[: NUM_TOKENS * 8])["input_ids"][:NUM_TOKENS])
        cls.reference = perplexity(load(ARGS.model)[0], cls.tokens)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def quantize(self, scheme):
        out = pathlib.Path(self.folder.name) / scheme
        subprocess.run(
            [ARGS.quern, "quantize", ARGS.model, out, "--scheme", scheme, "--calibration-text", ARGS.calibration_text, "--log-level", "warning"],
            check=True)
        return out

    def check(self, scheme):
        out = self.quantize(scheme)
        stored = tensors_of(out)
        num_quantized = 0
        for name, original in self.source.items():
            values, scale = dequantized(name, stored)
            if scale is None:
                self.assertTrue(torch.equal(stored[name], original), name)
                continue
            num_quantized += 1
            exponent = torch.frexp(original.float().abs() / scale)[1] - 1
            half_quantum = torch.ldexp(torch.ones_like(values), exponent.clamp(min=-6) - 4)
            self.assertTrue(((values - original.float()).abs() <= half_quantum * scale * 1.000001).all(), name)
        self.assertGreater(num_quantized, 20)

        model, info = load(out)
        self.assertEqual([k for k in info["unexpected_keys"] if not k.endswith(NOT_IN_TRANSFORMERS)], [])
        self.assertEqual([k for k in info["missing_keys"] if k != "lm_head.weight"], [])
        self.assertFalse(info["mismatched_keys"])
        got = perplexity(model, self.tokens)
        print(f"{scheme}: {num_quantized} weights, perplexity {got:.4f}, source {self.reference:.4f}, ratio {got / self.reference:.4f}")
        self.assertLess(got / self.reference, SCHEMES[scheme])
        self.assertGreater(got / self.reference, 0.98)

    def test_block(self):
        self.check("block-fp8")

    def test_static(self):
        self.check("static-fp8")

    def test_channel(self):
        self.check("channel-fp8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--quern", "--model", "--calibration-text", "--text"):
        parser.add_argument(name, required=True)
    ARGS, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
