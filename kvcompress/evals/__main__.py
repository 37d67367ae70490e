"""`python -m kvcompress.evals …`: lm-eval's own command line, which then knows the model `kvcompress`.

python -m kvcompress.evals run --model kvcompress --model_args "pretrained=gpt2,method=kivi(bits=2)" --tasks piqa
"""

from lm_eval.__main__ import cli_evaluate

if __name__ == "__main__":
    cli_evaluate()
