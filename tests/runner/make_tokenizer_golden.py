"""Writes tests/golden/runner/tokenizer_bytes.json: texts and an independent tokeniser's ids.

    pip install tokenizers gguf
    python tests/runner/make_tokenizer_golden.py SmolLM2-135M-Instruct.Q4_1.gguf

The ids are those of Hugging Face's `tokenizers`, built from the vocabulary and merges in the model
file. The file keeps the tokens and merges that these texts can need, renumbered ("ids"); for the
model's own pre-tokeniser the ids in the whole vocabulary stand beside them ("model_ids").
`tokenizers` takes no ill-formed UTF-8: there the words are cut by hand, and merged by the slow
function below, which must agree with `tokenizers` on every other text. Not run by the tests.
"""

import json
import pathlib
import sys

import tokenizers
from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

MODERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
          r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

UNKNOWN = "<|endoftext|>"
SPECIALS = [UNKNOWN, "<|im_start|>", "<|im_end|>"]
WHOLE_WORD = "zqx"  # a token that no merge makes: llama-bpe takes it, the others do not

TEXTS = [
    "", "a", "Hello, world!", "The quick brown fox jumps over the lazy dog.",
    "1", "42", "123", "1234567", "3.14159", "a1b22c333", "x = 10_000;", "in 1999 and  2024",
    "٣٤٥ ½ Ⅷ ²", "1 2  3   4", "$100.00", "100%",
    "\n", "\n\n", "\n\n\n\n", "a\nb", "a\n\nb", "a \n b", "a  \n\n  b", "\r\n", "a\r\nb\r\n\r\nc",
    "end.\n", "end.\n\nNext", "!\r\n\r\n?", "  \n  \n  x", "\n \n", " \t\n\t ",
    " ", "  ", "   ", " a", "  a", "   a", "a ", "a  ", "trailing   ", "a   b", " !", "  !", "  7",
    "\t", "\ta", "\t\ta", "a\tb", "\t1", "\t!", "if x:\n\treturn 1\n\n\t\tpass", "    indented",
    "\u00a0", "a\u00a0b", "a\u00a0\u00a0b", "\u2003full_precision", "a\u3000b", "a\u0085b", "\u200bzero\u200b",
    "\u2028line\u2029", "\ufeffbom", "\x00\x01\x1f\x7f", "\x0b\x0c", "\x1cx",
    "don't can't we're I've I'm she'll he'd it's", "DON'T CAN'T WE'RE I'VE I'M SHE'LL HE'D IT'S",
    "Don'T 'S 's 'Re 'lL", "'", "''", "'s", "'x", " 's", "o'clock", "'\u017f", "rock 'n' roll",
    "it\u2019s", "'l 'v 'r", "'ll'll", "x'd've",
    "😀", "😀😀", "Hi 😀!", "👨‍👩‍👧‍👦", "👍🏽", "🇩🇪🇫🇷", "❤️", "a😀b",
    "你好", "你好,世界!", "日本語のテキスト", "カタカナ", "한국어 텍스트", "中文abc中文123", "。。。",
    "مرحبا بالعالم", "שלום", "हिन्दी", "ไทย", "Привет, мир", "Ελληνικά", "ẞß İı ǅ",
    "e\u0301", "caf\u00e9 cafe\u0301", "a\u0308o\u0308", "\u0301", "n\u0303o", "Z̷̧̛a̴l̶g̵o̶",
    "naïve façade", "ﬁne", "①②③", "ª º", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "𐍈", "\U0010ffff", "\ue000", "\ufffd",
    "https://example.org/a_b?c=d&e=f#g", "foo_bar fooBar FooBar", "int main() { return 0; }",
    "a--b---c", "...", "....", "!!??", "<<>>", "#include <vector>", "C++20/C#", "x^2+y^2",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "hahahahahaha", "          ", "==========",
    "zqx", "zqx zqx", "azqx",
]

SPECIAL_TEXTS = [
    "<|im_start|>", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "a<|im_end|>b",
    "<|im_end|><|im_end|>", "<|im_end", "<|im_<|im_end|>", "  <|im_start|>  x", "<|endoftext|>1",
]

# Words as hex, cut as if each ill-formed sequence were U+FFFD; where they differ, the second list is
# llama-bpe's and qwen2's, which let any one character lead a word of letters.
ILL_FORMED = [
    (["80"],), (["61", "ff", "62"], ["61", "ff62"]), (["61", "20c3", "20", "2062"],), (["e282"],),
    (["e282", "41"], ["e28241"]), (["f09f98"],), (["41", "c0c0"],), (["20eda080"],),
    (["f4908080", "61"],), (["c3", "c3a9"], ["c3c3a9"]), (["fe", "31", "fe"],), (["0a", "e2"],),
    (["0a", "0a", "e2"], ["0a0a", "e2"]),
]


def byte_alphabet():
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in visible]
    return {b: chr(b) for b in visible} | {b: chr(0x100 + i) for i, b in enumerate(others)}


ALPHABET = byte_alphabet()


def pre_tokenizer(name):
    if name == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        return pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    digits = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}[name]
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(MODERN.format(digits=digits)), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def build(tokens, merges, pre, with_specials):
    tokenizer = Tokenizer(models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in merges],
        unk_token=UNKNOWN, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizer(pre)
    if with_specials:
        tokenizer.add_special_tokens(
            [AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    return tokenizer


def merge_slowly(word, ranks):
    """The tokens of one word (bytes), by the definition: the best pair first, leftmost first."""
    pieces = [ALPHABET[b] for b in word]
    while True:
        neighbours = enumerate(zip(pieces, pieces[1:]))
        pairs = [(ranks.get(pair, len(ranks)), i) for i, pair in neighbours]
        rank, i = min(pairs, default=(len(ranks), 0))
        if rank == len(ranks):
            return pieces
        pieces[i:i + 2] = [pieces[i] + pieces[i + 1]]


def needed(tokens, merges):
    """The tokens and merges that lie inside a text, and all bytes."""
    all_bytes = [t.encode() for t in TEXTS + SPECIAL_TEXTS]
    all_bytes += [bytes.fromhex("".join(w[0])) for w in ILL_FORMED]
    parts = set()
    for text in all_bytes:
        visible = "".join(ALPHABET[b] for b in text)
        parts |= {visible[i:j] for i in range(len(visible))
                  for j in range(i + 1, min(len(visible), i + 64) + 1)}
    kept_merges = [m for m in merges if m.replace(" ", "") in parts]
    kept = {part for merge in kept_merges for part in [*merge.split(" "), merge.replace(" ", "")]}
    kept |= set(ALPHABET.values()) | set(SPECIALS)
    return [t for t in tokens if t in kept] + [WHOLE_WORD], kept_merges


def cases_of(pre, vocabulary, whole):
    tokens, merges = vocabulary
    ids_of = {token: i for i, token in enumerate(tokens)}
    ranks = {tuple(m.split(" ")): i for i, m in enumerate(merges)}
    whole_ids = {token: i for i, token in enumerate(whole[0])}
    plain = build(tokens, merges, pre, False)
    special = build(tokens, merges, pre, True)

    def case(data, ids, words, parse_special, model_ids):
        result = {"pre": pre, "hex": data.hex(), "parse_special": parse_special, "ids": ids}
        if words is not None:
            result["word_bytes"] = words
        if model_ids is not None:
            result["model_ids"] = model_ids
        return result

    cases = []
    for parse_special, texts in ((False, TEXTS + SPECIAL_TEXTS), (True, SPECIAL_TEXTS)):
        small = special if parse_special else plain
        large = build(*whole, pre, parse_special) if pre == "smollm" else None
        for text in texts:
            words = None
            if not parse_special:
                cut = plain.pre_tokenizer.pre_tokenize_str(text)
                words = [len(word) for word, _ in cut]
                if pre != "llama-bpe":
                    back = {c: b for b, c in ALPHABET.items()}
                    slow = [t for word, _ in cut
                            for t in merge_slowly([back[c] for c in word], ranks)]
                    assert [ids_of.get(t, 0) for t in slow] == small.encode(text).ids, text
            model_ids = large.encode(text).ids if large else None
            cases.append(
                case(text.encode(), small.encode(text).ids, words, parse_special, model_ids))
    for cuts in ILL_FORMED:
        words = cuts[-1] if pre in ("llama-bpe", "qwen2") else cuts[0]
        data = [bytes.fromhex(w) for w in words]
        pieces = [t for word in data for t in merge_slowly(word, ranks)]
        model_ids = [whole_ids.get(t, 0) for t in pieces] if pre == "smollm" else None
        cases.append(case(b"".join(data), [ids_of.get(t, 0) for t in pieces],
                          [len(w) for w in data], False, model_ids))
    return cases


def main():
    fields = GGUFReader(sys.argv[1]).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = fields["tokenizer.ggml.merges"].contents()
    vocabulary = needed(tokens, merges)
    golden = {
        "made_by": f"make_tokenizer_golden.py, tokenizers {tokenizers.__version__}, "
                   f"{pathlib.Path(sys.argv[1]).name}; see there",
        "tokens": vocabulary[0], "merges": vocabulary[1], "control_tokens": SPECIALS,
        "unknown": vocabulary[0].index(UNKNOWN),
    }
    cases = [c for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2")
             for c in cases_of(pre, vocabulary, (tokens, merges))]
    lines = ",\n".join("  " + json.dumps(c, separators=(",", ":")) for c in cases)
    head = json.dumps(golden, separators=(",", ":"))[:-1].replace('","tokens"', '",\n"tokens"')
    path = pathlib.Path(__file__).parent.parent / "golden/runner/tokenizer_bytes.json"
    path.write_text(f'{head},\n"cases": [\n{lines}\n]}}\n')
    print(f"{path}: {len(vocabulary[0])} tokens, {len(vocabulary[1])} merges, {len(cases)} cases, "
          f"{path.stat().st_size} bytes")


main()
