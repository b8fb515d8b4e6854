"""Vector code for loops that Numba compiles, written as LLVM instructions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from numba import types
from numba.core import cgutils

WIDE = torch.cpu._is_avx512_supported()
LANES = 16 if WIDE else 8  # float32 elements of a vector
WIDTHS = (LANES, 4, 1)  # of vectors: one of the last where dimensions are not whole vectors
INDEX, WORD, FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()


def describe_processor() -> str:
    """The name of this machine's processor and what it can, as LLVM says them."""
    return f"{get_host_cpu_name()} {get_host_cpu_features().flatten()}"


class BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


class VectorCode:
    """Writes vector code over the arguments of an intrinsic; its arrays are contiguous."""

    def __init__(
        self, context: Any, builder: Any, signature: Any, args: Any, lanes: int = LANES
    ) -> None:
        self.builder, self.lanes, self._context = builder, lanes, context
        self._signature, self._args = signature, args
        self.floats, self.words = ir.VectorType(FLOAT, lanes), ir.VectorType(WORD, lanes)
        self.zero = ir.Constant(self.floats, [0.0] * lanes)

    def array(self, place: int) -> tuple[Any, Any]:
        """The data of an argument that is an array, and how long its last dimension is."""
        array = self._context.make_array(self._signature.args[place])(
            self._context, self.builder, self._args[place]
        )
        shape = array.shape
        return array.data, self.builder.extract_value(shape, len(shape.type) - 1)

    def constant(self, value: int) -> Any:
        """`value` as an index."""
        return ir.Constant(INDEX, value)

    def behind(self, first: Any, count: int, step: int = 1) -> list[Any]:
        """The indices first, first + step, …, `count` of them."""
        return [self.builder.add(first, self.constant(i * step)) for i in range(count)]

    def at(self, data: Any, width: Any, row: Any, column: Any) -> Any:
        """The address of an element of a matrix."""
        place = self.builder.add(self.builder.mul(row, width), column)
        return self.builder.gep(data, [place])

    def load(self, pointer: Any, kind: Any) -> Any:
        """A vector of type `kind`, aligned as an element is."""
        loaded = self.builder.load(self.builder.bitcast(pointer, kind.as_pointer()))
        loaded.align = kind.element.width // 8 if isinstance(kind.element, ir.IntType) else 4
        return loaded

    def store(self, value: Any, pointer: Any) -> None:
        """Write a vector of float32."""
        pointer = self.builder.bitcast(pointer, value.type.as_pointer())
        self.builder.store(value, pointer).align = 4

    def load_wide(self, pointer: Any, dtype: Any) -> Any:
        """Entries as float32; uint16 are bits of bfloat16, uint8 of E4M3, int8 integers."""
        if dtype == types.float32:
            return self.load(pointer, self.floats)
        builder = self.builder
        narrow = self.load(pointer, ir.VectorType(ir.IntType(dtype.bitwidth), self.lanes))
        if dtype == types.uint16:
            return builder.bitcast(self._shift(builder.zext(narrow, self.words), 16), self.floats)
        if dtype == types.int8:
            return builder.sitofp(builder.sext(narrow, self.words), self.floats)
        return self._widen_e4m3(narrow)

    def _shift(self, words: Any, bits: int) -> Any:
        return self.builder.shl(words, ir.Constant(words.type, [bits] * self.lanes))

    def _widen_e4m3(self, narrow: Any) -> Any:
        """Exponents of E4M3 are 120 lower than those of float32. All ones but the sign are NaN."""
        builder, words, lanes = self.builder, self.words, self.lanes
        code = self._shift(builder.sext(narrow, words), 20)  # the sign fills the bits above it
        bits = builder.and_(code, ir.Constant(words, [0x87F00000] * lanes))
        scale = ir.Constant(self.floats, [2.0**120] * lanes)
        value = builder.fmul(builder.bitcast(bits, self.floats), scale)
        size = ir.Constant(words, [0x07F00000] * lanes)
        is_nan = builder.icmp_unsigned("==", builder.and_(code, size), size)
        return builder.select(is_nan, ir.Constant(self.floats, [float("nan")] * lanes), value)

    def spread(self, pointer: Any) -> Any:
        """A vector of the one element at `pointer`."""
        element = self.builder.load(pointer)
        empty = ir.Constant(ir.VectorType(element.type, self.lanes), ir.Undefined)
        lone = self.builder.insert_element(empty, element, ir.Constant(WORD, 0))
        return self.shuffle(lone, empty, [0] * self.lanes)

    def fuse(self, total: Any, left: Any, right: Any) -> Any:
        """total + left · right, rounded once; words are pairs of bfloat16, with AVX512-BF16."""
        if left.type == self.words:
            pairs = ir.VectorType(BFloat(), 2 * self.lanes)
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            args = [total, *(self.builder.bitcast(x, pairs) for x in (left, right))]
        else:
            name, args = f"llvm.fma.v{self.lanes}f32", [left, right, total]
        kind = ir.FunctionType(self.floats, [x.type for x in args])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)  # type: ignore[no-untyped-call]
        return self.builder.call(function, args)

    def shuffle(self, first: Any, last: Any, places: list[int]) -> Any:
        """The elements of two vectors that `places` name, those of the second behind the first."""
        mask = ir.Constant(ir.VectorType(WORD, len(places)), places)
        return self.builder.shuffle_vector(first, last, mask)

    def sum_each(self, four: list[Any]) -> Any:
        """The sums of four vectors, as one of four elements."""
        lanes = self.lanes
        if lanes == 1:
            pairs = [self.shuffle(four[i], four[i + 1], [0, 1]) for i in (0, 2)]
            return self.shuffle(pairs[0], pairs[1], [0, 1, 2, 3])
        fours = range(0, lanes, 4)
        low = [place for at in fours for place in (at, lanes + at, at + 1, lanes + at + 1)]
        high = [place + 2 for place in low]
        first = self._fold(four[0], four[1], low, high)
        last = self._fold(four[2], four[3], low, high)
        low = [place for at in fours for place in (at, at + 1, lanes + at, lanes + at + 1)]
        high = [place + 2 for place in low]
        total = self._fold(first, last, low, high)
        while lanes > 4:
            lanes //= 2
            total = self._fold(total, total, list(range(lanes)), list(range(lanes, 2 * lanes)))
        return total

    def _fold(self, first: Any, last: Any, low: list[int], high: list[int]) -> Any:
        return self.builder.fadd(self.shuffle(first, last, low), self.shuffle(first, last, high))

    def loop(self, count: Any, sums: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> Any:
        """`sums` after `body` of 0, 1, … before `count`, which is 1 or more."""
        builder, before = self.builder, self.builder.block
        block, end = (builder.append_basic_block(name) for name in ("loop", "end"))
        builder.branch(block)
        builder.position_at_end(block)
        step = builder.phi(INDEX)
        held = [builder.phi(value.type) for value in sums]
        added = body(step, held)
        following = builder.add(step, self.constant(1))
        last = builder.block
        for phi, first, later in zip(
            [step, *held], [self.constant(0), *sums], [following, *added], strict=True
        ):
            phi.add_incoming(first, before)
            phi.add_incoming(later, last)
        builder.cbranch(builder.icmp_signed("<", following, count), block, end)
        builder.position_at_end(end)
        return added

    def add_products(self, sums: list[Any], left: Iterable[Any], right: list[Any]) -> list[Any]:
        """`sums` of a tile, row by row, and the products of `left` by rows, `right` by columns."""
        pairs = ((x, y) for x in left for y in right)
        return [self.fuse(total, *pair) for total, pair in zip(sums, pairs, strict=True)]


def choose(builder: Any, value: Any, cases: Iterable[int], write: Callable[[int], None]) -> None:
    """What `write` writes for that of `cases` that `value`, an index, is."""
    end = builder.append_basic_block("chosen")
    switch = builder.switch(value, end)
    for case in cases:
        block = builder.append_basic_block("case")
        switch.add_case(ir.Constant(INDEX, case), block)
        builder.position_at_end(block)
        write(case)
        builder.branch(end)
    builder.position_at_end(end)
