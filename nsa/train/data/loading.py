"""From a config to its tokenizer and its loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from nsa.train.config import DataConfig, RunConfig
from nsa.train.data.packages import need
from nsa.train.errors import TrainError, TrainExit

if TYPE_CHECKING:
    from nsa.train.data.corpora import Corpus, Split, SplitRule, TextDocument
    from nsa.train.data.loader import Loader
    from nsa.train.data.packing import BatchShape, DocumentRecipe, GeneratedRecipe
    from nsa.train.data.vocabulary import Tokenizer

GENERATED = ("random", "synthetic", "needle", "recall", "copying")
# Every rank waits while a BPE is trained, so its sample is bounded.
BPE_SAMPLE_BYTES = 32 * 2**20


def tokenizer_of(config: RunConfig, out: Path) -> Tokenizer:
    """The run's tokenizer, saved as ``out``/tokenizer.json.

    data.tokenizer=byte: 256 ids of bytes and end-of-text, 256; random and synthetic data have the
    256 alone. bpe: read from ``out`` where it is there, else trained on up to 32 MiB of the train
    split; every rank trains the same, so let rank 0 make it before the others ask. file: a
    byte-level tokenizer.json. tiktoken: an encoding whose vocabulary is at hand. TrainError DATA
    where ``out`` has another one, which stays.
    """
    from nsa.train.data import vocabulary

    made = _given_tokenizer(config)
    if made is None and (out / vocabulary.FILE_NAME).exists():
        return vocabulary.tokenizer_from_file(out / vocabulary.FILE_NAME, "the run's BPE")
    if made is None:
        made = vocabulary.train_bpe(_bpe_sample(config.data), config.data.vocab_size)
    _keep(made, out / vocabulary.FILE_NAME)
    return made


def vocabulary_size(config: RunConfig) -> int:
    """Ids of the tokenizer that ``config`` names; of a BPE that is trained in the run, at most.

    TrainError DATA for a tokenizer that is not at hand.
    """
    made = _given_tokenizer(config)
    return config.data.vocab_size if made is None else made.vocab_size


def _given_tokenizer(config: RunConfig) -> Tokenizer | None:
    """None for a BPE, which the run trains."""
    need("numpy", "nsa.train")
    from nsa.train.data import vocabulary

    data = config.data
    if data.kind in GENERATED and data.tokenizer != "byte":
        raise TrainError(
            TrainExit.USAGE,
            f"data.kind={data.kind} makes bytes, and data.tokenizer={data.tokenizer!r} is for text;"
            " omit data.tokenizer",
        )
    if data.tokenizer == "byte":
        return vocabulary.ByteTokenizer(has_end=data.kind not in GENERATED)
    if data.tokenizer == "tiktoken":
        return vocabulary.TiktokenTokenizer(str(data.tokenizer_path))
    if data.tokenizer == "file":
        path = Path(str(data.tokenizer_path)).expanduser()
        return vocabulary.tokenizer_from_file(path, "data.tokenizer_path")
    return None


def _keep(tokenizer: Tokenizer, path: Path) -> None:
    """Save as ``path``, or compare with what the run began with; TrainError DATA for another."""
    if not path.exists():
        tokenizer.save(path.parent)
        return
    with TemporaryDirectory(prefix="nsa-train-") as folder:
        tokenizer.save(Path(folder))
        is_same = (Path(folder) / path.name).read_bytes() == path.read_bytes()
    if not is_same:
        raise TrainError(
            TrainExit.DATA,
            f"{path} is of another tokenizer than data.tokenizer gives now; wanted the one that the"
            " run began with, which that file is; bring it back, or begin anew with another --out",
        )


def load(
    config: RunConfig, *, rank: int, world_size: int, split: Split, tokenizer: Tokenizer
) -> Loader:
    """The loader of ``rank``.

    data.kind: text, a file is a document, a long one many; parquet, a row of data.text_column is a
    document; fineweb_edu, the same of its schema, streamed from the hub without data.paths; random,
    uniform bytes of ln 256 nats each; synthetic, a Markov chain over 64 bytes of 1.1097 nats each.
    data.held_out_pct: by hash of a document's name, the same for every seed, at least one document
    of a small corpus. data.packing, data.workers, data.prefetch: as `DataConfig`; the order of
    batches depends on neither of the last two. data.shards: 0 is a power of two up to 64 of 2
    pieces and 16 KiB each; a rank reads its own shards only, so the number of ranks divides it.

    TrainError: DATA for a corpus that is missing, empty, unreadable, or
    shorter than a sequence, and for an empty held-out split; DEVICE for a world size that does not
    divide the number of shards; MISSING for a package.
    """
    need("numpy", "nsa.train")
    import torch

    from nsa.train.data.loader import Loader, LoaderPlan
    from nsa.train.data.packing import BatchShape

    data = config.data
    shape = BatchShape(config.train.batch, config.train.seq_len, data.packing)
    recipe: DocumentRecipe | GeneratedRecipe
    if data.kind in GENERATED:
        recipe, floor, description = _generated(data, shape, split, tokenizer)
    else:
        num_shards = world_size if split == "held_out" else None
        recipe, description = _documents(data, shape, split, tokenizer, num_shards)
        floor = None
    if split == "train":
        check_world_size(world_size, recipe.num_shards)
    identity: dict[str, str | int] = {
        "corpus": str(description["sha256"]),
        "tokenizer": tokenizer.sha256,
        "num_shards": recipe.num_shards,
        "packing": data.packing,
        "seed": data.seed,
    }
    plan = LoaderPlan(
        split=split,
        rank=rank,
        world_size=world_size,
        workers=data.workers,
        prefetch=data.prefetch,
        pin=config.train.device != "cpu" and torch.cuda.is_available(),
        identity=identity,
        entropy_floor_nats=floor,
        description=description,
    )
    return Loader(recipe, shape, plan)


def check_world_size(world_size: int, num_shards: int) -> None:
    if num_shards % world_size:
        fitting = [str(size) for size in range(1, num_shards + 1) if num_shards % size == 0]
        raise TrainError(
            TrainExit.DEVICE,
            f"{world_size} ranks do not divide the corpus' {num_shards} shards; start"
            f" {', '.join(fitting)} ranks, or set data.shards to a multiple of {world_size}",
        )


def _generated(
    data: DataConfig, shape: BatchShape, split: Split, tokenizer: Tokenizer
) -> tuple[GeneratedRecipe, float, dict[str, object]]:
    from nsa.train.data import generated
    from nsa.train.data.corpora import MAX_SHARDS, data_error, listing_sha256
    from nsa.train.data.packing import GeneratedRecipe

    if tokenizer.vocab_size != generated.NUM_SYMBOLS:
        raise data_error(
            f"data.kind={data.kind} has {generated.NUM_SYMBOLS} ids, the tokenizer"
            f" {tokenizer.vocab_size}; take tokenizer_of(config, out)"
        )
    if data.kind == "needle" and (shape.packing != "rows" or shape.length < generated.LEAST_NEEDLE):
        raise data_error(
            f"data.kind=needle with data.packing={shape.packing} and train.seq_len={shape.length};"
            f" wanted rows of {generated.LEAST_NEEDLE} tokens or more; each holds its needles"
        )
    if data.kind in ("recall", "copying"):
        _check_questions(data, shape)
    language = generated.Language(data.kind, data.seed, split == "held_out", data.pairs)
    recipe = GeneratedRecipe(language, shape, data.shards or MAX_SHARDS)
    floors = {
        "random": generated.random_entropy_nats(),
        "synthetic": generated.synthetic_entropy_nats(),
        "needle": 0.0,  # each label is stated before
        "recall": 0.0,
        "copying": 0.0,
    }
    description: dict[str, object] = {
        "kind": data.kind,
        "split": split,
        "documents": None,
        "bytes": None,
        "binary_files_left_out": 0,
        "shards": recipe.num_shards,
        "sha256": listing_sha256([data.kind, data.seed, *([data.pairs] if data.pairs else [])]),
    }
    return recipe, floors[data.kind], description


def _check_questions(data: DataConfig, shape: BatchShape) -> None:
    from nsa.train.data import copying, recall
    from nsa.train.data.corpora import data_error

    least = copying.LEAST_TOKENS if data.kind == "copying" else recall.LEAST_TOKENS
    if shape.packing != "rows" or shape.length < least:
        raise data_error(
            f"data.kind={data.kind} with data.packing={shape.packing} and"
            f" train.seq_len={shape.length}; wanted rows of {least} tokens or more; each states"
            " what it asks for"
        )
    most = recall.most_pairs(shape.length)
    if data.pairs > most:
        raise data_error(
            f"data.pairs={data.pairs} do not fit into rows of {shape.length} tokens; wanted at most"
            f" {most}; lower data.pairs, or raise train.seq_len"
        )


def _documents(
    data: DataConfig,
    shape: BatchShape,
    split: Split,
    tokenizer: Tokenizer,
    num_shards: int | None,
) -> tuple[DocumentRecipe, dict[str, object]]:
    from nsa.train.data import corpora
    from nsa.train.data.packing import DocumentRecipe

    corpus, rule, units = _split_of(data, split)
    if not units:
        # One document is never held out.
        more = "give a second" if corpus.num_documents == 1 else "make data.held_out_pct larger"
        raise corpora.data_error(
            f"the {split} split of {data.kind} is empty ({_counted(corpus.num_documents)},"
            f" data.held_out_pct={data.held_out_pct:g}); "
            + (
                f"{more}, give data.eval_paths, or set train.eval_every=0"
                if split == "held_out"
                else "give more text, or make data.held_out_pct smaller"
            )
        )
    _check_length(corpus, shape.length)
    if num_shards is None:
        num_shards = data.shards or corpora.num_shards_for(
            len(units), sum(corpus.sizes[unit] for unit in units) if corpus.num_bytes else None
        )
        if num_shards > len(units):
            raise corpora.data_error(
                f"data.shards={num_shards}, and the corpus has {len(units)} pieces to deal to them;"
                f" set at most {len(units)}, or 0"
            )
    # The held-out batches are the same in runs of several seeds.
    seed = data.seed if split == "train" else 0
    recipe = DocumentRecipe(
        corpus=corpus,
        rule=rule,
        shards=corpora.deal(units, corpus.sizes, num_shards, seed),
        tokenizer=tokenizer,
        shape=shape,
        seed=seed,
        endless=split == "train",
    )
    description: dict[str, object] = {
        "kind": data.kind,
        "split": split,
        "documents": corpus.num_documents,
        "bytes": corpus.num_bytes,
        "binary_files_left_out": corpus.num_binary,
        "shards": num_shards,
        "sha256": corpus.sha256,
    }
    return recipe, description


def _counted(documents: int | None) -> str:
    if documents is None:
        return "documents not counted"
    return f"{documents:,} document{'' if documents == 1 else 's'}"


def _check_length(corpus: Corpus, length: int) -> None:
    """An id is a byte or more, so a corpus has at most as many as bytes and ends of documents."""
    from nsa.train.data.corpora import data_error

    if corpus.num_bytes is None or corpus.num_documents is None:
        return
    most = corpus.num_bytes + corpus.num_documents
    if most < length + 1:
        raise data_error(
            f"the whole corpus is {corpus.num_bytes} bytes, shorter than one sequence of"
            f" train.seq_len={length} tokens; make train.seq_len smaller, or give more text"
        )


def _split_of(data: DataConfig, split: Split) -> tuple[Corpus, SplitRule, list[int]]:
    """The corpus that the split is of, the rule, and the units that hold its documents."""
    from nsa.train.data.corpora import SplitRule, split_rule, units_of

    evaluated = split == "held_out" and bool(data.eval_paths)
    patterns, option = (data.paths, "data.paths")
    if evaluated:
        patterns, option = data.eval_paths, "data.eval_paths"
    corpus = OPENERS[data.kind](data, patterns, option)
    if data.eval_paths:
        rule = SplitRule(split, limit=-1.0, whole=True)
    else:
        rule = split_rule(corpus, split, data.held_out_pct)
    return corpus, rule, units_of(corpus, rule)


def _open_text(data: DataConfig, patterns: tuple[str, ...], option: str) -> Corpus:
    from nsa.train.data.text_files import TextFiles

    return TextFiles.open(patterns, option)


def _open_parquet(data: DataConfig, patterns: tuple[str, ...], option: str) -> Corpus:
    from nsa.train.data.parquet_rows import ParquetRows

    return ParquetRows(patterns, data.text_column, option)


def _open_fineweb_edu(data: DataConfig, patterns: tuple[str, ...], option: str) -> Corpus:
    from nsa.train.data.fineweb import FineWebEdu

    return FineWebEdu(patterns, option)


OPENERS: Mapping[str, Callable[[DataConfig, tuple[str, ...], str], Corpus]] = {
    "text": _open_text,
    "parquet": _open_parquet,
    "fineweb_edu": _open_fineweb_edu,
}


def _bpe_sample(data: DataConfig) -> Iterator[TextDocument]:
    """Documents of the train split from all over the corpus, in a seeded order, up to 32 MiB."""
    import numpy as np

    corpus, rule, units = _split_of(data, "train")
    order = np.random.default_rng([data.seed, 3]).permutation(len(units))
    if not units:
        raise TrainError(
            TrainExit.DATA,
            "the train split is empty, and the BPE is trained on it; give more text, or make"
            " data.held_out_pct smaller",
        )
    share, left = BPE_SAMPLE_BYTES // min(len(units), 32), BPE_SAMPLE_BYTES
    for number in order:
        of_unit = share
        for document in corpus.read(units[number], 0):
            if rule.has(document.name):
                yield document
                of_unit -= len(document.text)
                left -= len(document.text)
            if min(of_unit, left) <= 0:
                break
        if left <= 0:
            return
