"""A causal character model, a small transformer, trained with K-FAC and with AdamW.

The text is made here: sums in words, "seventeen and forty-two make fifty-nine." The
spelling is easy to learn; the sums take attention to two words of the sentence. The
first words of a sentence can't be guessed, so the loss has a floor above zero. Both
optimizers start from the same weights and see the same batches for the same number of
epochs. K-FAC runs with its default arguments. With --tune, AdamW takes the best of
four learning rates on a validation split.
"""

import comparison


def add_arguments(parser):
    """Adds the arguments that only this example has.

    Args:
        parser: The parser of the command line.
    """
    add = parser.add_argument
    add("--sequences", type=int, default=4000, help="default: %(default)s")
    add("--length", type=int, default=64, help="characters each; default: %(default)s")
    comparison.add_tuning(parser, "four learning rates for AdamW")


# Selects the backend, so it has to come before Keras is imported.
args = comparison.parse_arguments(
    __doc__, epochs=10, batch_size=100, extra=add_arguments
)
if args.smoke:
    args.sequences, args.length, args.batch_size = 300, 16, 100

import functools

import keras
import networks
import numpy as np

import keras_secondorder as kso

RATES = (3e-4, 1e-3, 3e-3, 1e-2) if args.tune else (1e-3,)
ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen "
    "fourteen fifteen sixteen seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def words(number):
    """Spells a number below a hundred.

    Args:
        number: Integer from 0 to 99.

    Returns:
        Its name.
    """
    if number < 20:
        return ONES[number]
    ten, one = divmod(number, 10)
    return TENS[ten - 2] + (f"-{ONES[one]}" if one else "")


def text(characters, seed):
    """Writes sums in words.

    Args:
        characters: Length of the text.
        seed: Seed of the numbers.

    Returns:
        The text.
    """
    generator = np.random.default_rng(seed)
    sentences, written = [], 0
    while written < characters:
        a, b = generator.integers(0, 50, 2)
        sentences.append(f"{words(a)} and {words(b)} make {words(a + b)}. ")
        written += len(sentences[-1])
    return "".join(sentences)[:characters]


def sequences(count, length, alphabet, seed):
    """Cuts a text into sequences, and the same sequences one character later.

    Args:
        count: Number of sequences.
        length: Characters in each.
        alphabet: The characters that occur, sorted.
        seed: Seed of the text.

    Returns:
        Indices in the alphabet, two arrays (count, length).
    """
    characters = list(text(count * length + 1, seed))
    ids = np.searchsorted(alphabet, characters).astype("int32")
    return ids[:-1].reshape(count, length), ids[1:].reshape(count, length)


def main():
    """Trains with all optimizers, then prints a table and saves a plot."""
    alphabet = sorted(set(text(10_000, seed=0)))
    train = sequences(args.sequences, args.length, alphabet, seed=1)
    test = sequences(args.sequences // 4, args.length, alphabet, seed=2)
    data_name = f"{args.sequences} sequences of {args.length} characters"
    print(f"Data: {data_name}, sums in words. Backend: {keras.config.backend()}")
    adam = keras.optimizers.AdamW
    candidates = {
        "K-FAC": [("K-FAC", kso.KFAC)],
        "AdamW": [(f"AdamW {rate:g}", functools.partial(adam, rate)) for rate in RATES],
    }
    build = functools.partial(
        networks.character_transformer, args.length, len(alphabet)
    )
    plot = "transformer.png"
    comparison.race(args, build, candidates, train, test, data_name, plot)


if __name__ == "__main__":
    main()
