"""Instructions that Numba does not offer on the CPU: atomic add, maximum, bit cast and prefetch."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def next_task(typingctx: Any, counter: Any) -> Any:
    """Atomically add 1 to counter[0] (int64, contiguous) and return the value before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", array.data, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counter), codegen


@intrinsic
def larger(typingctx: Any, a: Any, b: Any) -> Any:
    """The larger of float32 a and b, none of them NaN; a loop of it vectorises, one of max not."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = context.get_value_type(types.float32)
        function = ir.FunctionType(kind, [kind, kind])
        callee = cgutils.get_or_insert_function(builder.module, function, "llvm.maxnum.f32")  # type: ignore[no-untyped-call]
        return builder.call(callee, args, fastmath=("nnan", "nsz"))

    return types.float32(types.float32, types.float32), codegen


@intrinsic
def power_of_two(typingctx: Any, n: Any) -> Any:
    """2 to the power of int32 n, -126 to 127, as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bias, place = (ir.Constant(ir.IntType(32), value) for value in (127, 23))
        bits = builder.shl(builder.add(args[0], bias), place)
        return builder.bitcast(bits, context.get_value_type(types.float32))

    return types.float32(types.int32), codegen


@intrinsic
def prefetch(typingctx: Any, array: Any, offset: Any) -> Any:
    """Read the cache line of element `offset` of a contiguous array ahead, to L2; never faults."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(data, [args[1]]), cgutils.voidptr_t)
        # To read, from L2 on, data. More lines are on their way to L2 at once than to L1.
        flags = [ir.Constant(ir.IntType(32), value) for value in (0, 2, 1)]
        function = ir.FunctionType(
            ir.VoidType(), [cgutils.voidptr_t, *[flag.type for flag in flags]]
        )
        callee = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0i8")  # type: ignore[no-untyped-call]
        builder.call(callee, [address, *flags])
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen
