"""Runs the PTX of a kernel of one warpgroup on NumPy arrays, an element for each of 128 threads.

Pallas's interpreter knows neither layouts nor inline code. This runs what a GPU will run: a file of
PTX for any target, on any machine. Threads proceed together, so it finds no races, and a branch
must be taken by all threads of a CTA or by none.
"""

import functools
import itertools
import operator
import re
import struct

import numpy as np

THREADS = 128
_BASE = 1 << 20  # address of the first array in global memory
_THREAD = np.arange(THREADS, dtype=np.uint64)
_LANE = (_THREAD % 32).astype(np.int64)
_ARITHMETIC = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.floordiv,
    "rem": operator.mod,
    "min": np.minimum,
    "max": np.maximum,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "fma": lambda a, b, c: a * b + c,
    "mad": lambda a, b, c: a * b + c,
}
_OF_FLOATS = {"div": operator.truediv, "min": np.fmin, "max": np.fmax}
_UNARY = {
    "neg": operator.neg,
    "popc": lambda x: np.bitwise_count(x).astype(np.uint32),
    "bfind": lambda x: np.where(x == 0, 2**32 - 1, np.log2(np.maximum(x, 1))).astype(np.uint32),
    "abs": np.abs,
    "ex2": np.exp2,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rcp": lambda x: 1 / x,
}
_SHIFTS = {"shl": operator.lshift, "shr": operator.rshift}
_INTEGERS = {"b": "u", "u": "u", "s": "i", "f": "f"}


def run(ptx, inputs, outputs, grid, aliases=(), order=None):
    """Runs a kernel.

    Args:
        ptx: text of the PTX.
        inputs: arrays that the kernel reads.
        outputs: shapes and dtypes of the results.
        grid: number of CTAs along each axis of the kernel, at most three.
        aliases: indices of inputs that the kernel changes.
        order: indices of the inputs and outputs, in the order of the kernel's parameters.

    Returns:
        The results, and the changed inputs.
    """
    arrays = [np.ascontiguousarray(x) for x in inputs]
    arrays += [np.zeros(shape, dtype) for shape, dtype in outputs]
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // 256) * 256
    memory = np.zeros(size, np.uint8)
    for start, array in zip(starts, arrays, strict=True):
        memory[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    program = _Program(ptx)
    for place in itertools.product(*map(range, grid)):
        _Block(program, memory, [_BASE + starts[i] for i in order], place).run()

    def read(i):
        data = memory[starts[i] : starts[i] + arrays[i].nbytes]
        return data.view(arrays[i].dtype).reshape(arrays[i].shape)

    changed = [read(i) for i in aliases]
    return [read(i) for i in range(len(inputs), len(arrays))], changed


class _Program:
    """The instructions of a kernel, split into their parts, and its labels."""

    def __init__(self, ptx):
        body = ptx[ptx.index(".entry") :]
        body = body[body.index("\n{\n") :]
        body = re.sub(r"//[^\n]*", "", body.partition("\t.section")[0])
        # Names of Mosaic's inline code, each in a block of its own.
        body = re.sub(r"\n\s*\{\s*\n", "\n", body)
        self.lines, self.labels = [], {}
        for line in re.split(r"[;\n]", body):
            line = re.sub(r"^\w+:\s+", "", line.strip())  # labels of loops that wait
            if label := re.fullmatch(r"(\$\w+):", line):
                self.labels[label[1]] = len(self.lines)
            elif line and line[0] not in "{}." and not line.startswith("$"):
                guard = None
                if line[0] == "@":
                    guard, line = line.split(None, 1)
                name, _, rest = line.partition("\t") if "\t" in line else line.partition(" ")
                operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
                self.lines.append((guard, name.strip(), operands))


def _view(bits, kind):
    """Registers, 64 bits each, as numbers of a type like `f32` or `s64`."""
    letter, width = kind[0], int(kind[1:])
    words = np.ascontiguousarray(bits.astype(np.uint64)).view(np.uint8).reshape(-1, 8)
    dtype = np.dtype(f"{_INTEGERS[letter]}{width // 8}")
    return np.ascontiguousarray(words[:, : width // 8]).reshape(-1).view(dtype)


def _bits(numbers):
    """Numbers as registers."""
    raw = np.ascontiguousarray(numbers)
    unsigned = raw.view(f"u{raw.dtype.itemsize}")
    return np.broadcast_to(unsigned, THREADS).astype(np.uint64)


def _bfloat16(numbers):
    """Rounds float32 to the bits of bfloat16."""
    bits = numbers.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(numbers), np.uint64(0x7FFF), rounded & 0xFFFF)


def _from_bfloat16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _halves(words):
    """[4, 8, 4] pairs as float64 [4, 8, 8]."""
    pair = [_from_bfloat16(words >> shift & 0xFFFF) for shift in (0, 16)]
    return np.stack(pair, axis=-1).reshape(4, 8, 8).astype(np.float64)


class _Block:
    """A CTA."""

    def __init__(self, program, memory, parameters, place):
        self.program, self.memory = program, memory
        self.shared = np.zeros(256 << 10, np.uint8)
        self.parameters = parameters
        self.groups = [[]]  # of asynchronous copies, the last one is open
        self.registers = {"%tid.x": _THREAD.copy()}
        for axis, i in zip("xyz", (*place[::-1], 0, 0), strict=False):
            self.registers[f"%ctaid.{axis}"] = np.full(THREADS, i, np.uint64)

    def run(self):
        position = 0
        while position < len(self.program.lines):
            guard, name, operands = self.program.lines[position]
            position += 1
            mask = np.ones(THREADS, bool)
            if guard:
                mask = self.registers[guard.lstrip("@!")] ^ guard.startswith("@!")
            if name == "ret":
                return
            if name.startswith("bra"):
                assert mask.all() or not mask.any(), "threads branch apart"
                if mask.all():
                    position = self.program.labels[operands[0]]
                continue
            self.execute(name.replace("::", "."), operands, mask)
        raise AssertionError("the kernel does not return")

    def get(self, name, kind="u64"):
        """An operand as numbers of a type."""
        assert name in self.registers or name[0] != "%", name
        if name.startswith("0f"):
            number = struct.unpack(">f", bytes.fromhex(name[2:]))[0]
            return np.full(THREADS, number, np.float32)
        if name.startswith("0d"):
            return np.full(THREADS, struct.unpack(">d", bytes.fromhex(name[2:]))[0])
        if name == "__dynamic_shmem__0":
            return np.zeros(THREADS, np.uint64)
        if name in self.registers:
            bits = self.registers[name]
        else:
            bits = np.full(THREADS, int(name, 0) % 2**64, np.uint64)
        return _view(bits, kind)

    def put(self, name, numbers, mask):
        """Sets a register."""
        if numbers.dtype == bool:
            value = np.broadcast_to(numbers, THREADS).copy()
        else:
            value = _bits(numbers)
        if not mask.all() and name in self.registers:
            value = np.where(mask, value, self.registers[name])
        self.registers[name] = value

    def address(self, operand):
        """The addresses in [%rd1+16]."""
        base, _, offset = operand.strip("[]").partition("+")
        return self.get(base.strip()).astype(np.int64) + int(offset or "0", 0)

    def access(self, name, operand):
        """The memory that an instruction uses, and places in it."""
        places = self.address(operand)
        if ".shared" in name:
            return self.shared, places
        return self.memory, places - _BASE

    def execute(self, name, operands, mask):
        parts = name.split(".")
        kind = parts[0]
        if kind in ("mul", "mad") and parts[1] in ("wide", "hi"):
            self.product(parts, operands, mask)
        elif kind in _ARITHMETIC:
            of_floats = _OF_FLOATS if parts[-1][0] == "f" else {}
            function = of_floats.get(kind, _ARITHMETIC[kind])
            self.arithmetic(parts, operands, mask, function)
        elif kind in _UNARY:
            self.unary(parts, operands, mask, _UNARY[kind])
        elif kind in _SHIFTS:
            self.shift(parts, operands, mask, _SHIFTS[kind])
        else:
            method = getattr(self, "op_" + kind, None)
            assert method, f"{name} {operands}"
            method(parts, operands, mask)

    def ignore(self, parts, operands, mask):
        """Barriers and fences: threads proceed together."""

    op_bar = op_fence = op_prefetch = op_griddepcontrol = ignore

    def op_ld(self, parts, operands, mask):
        if "param" in parts:
            number = re.search(r"param_(\d+)\]", operands[1])
            self.put(operands[0], np.uint64(self.parameters[int(number[1])]), mask)
            return
        names = [name.strip() for name in operands[0].strip("{}").split(",")]
        size = int(parts[-1][1:]) // 8
        memory, places = self.access(".".join(parts), operands[1])
        assert (places[mask] % (size * len(names)) == 0).all(), "a misaligned read"
        for i, name in enumerate(names):
            bytes_of = np.zeros((THREADS, 8), np.uint8)
            at = places[mask, None] + i * size + np.arange(size)
            assert at.size == 0 or (at.min() >= 0 and at.max() < memory.size), "outside"
            bytes_of[mask, :size] = memory[at]
            self.put(name, bytes_of.reshape(-1).view(np.uint64), mask)

    def op_st(self, parts, operands, mask):
        names = [name.strip() for name in operands[1].strip("{}").split(",")]
        size = int(parts[-1][1:]) // 8
        memory, places = self.access(".".join(parts), operands[0])
        assert (places[mask] % (size * len(names)) == 0).all(), "a misaligned write"
        for i, name in enumerate(names):
            data = self.get(name, f"u{8 * size}")
            at = places[mask, None] + i * size + np.arange(size)
            assert at.size == 0 or (at.min() >= 0 and at.max() < memory.size), "outside"
            memory[at] = np.ascontiguousarray(data).view(np.uint8).reshape(THREADS, size)[mask]

    def op_cp(self, parts, operands, mask):
        """Asynchronous copies, which are there no earlier than they are waited for."""
        if "commit_group" in parts:
            self.groups.append([])
        elif "wait_group" in parts:
            done = max(0, len(self.groups) - 1 - int(operands[0]))
            for copy in itertools.chain.from_iterable(self.groups[:done]):
                copy()
            del self.groups[:done]
        else:
            size, count = int(operands[2]), self.get(operands[3], "u32").astype(np.int64)
            target, source = self.address(operands[0]), self.address(operands[1]) - _BASE
            there = mask[:, None] & (np.arange(size) < count[:, None])
            assert (target % size == 0).all(), "a misaligned copy"
            assert (source[there[:, 0]] % size == 0).all(), "a misaligned copy"
            places = (target[:, None] + np.arange(size))[mask]
            data = self.memory[np.where(there, source[:, None] + np.arange(size), 0)]
            data = np.where(there, data, 0)[mask]  # what the source does not have is zero
            self.groups[-1].append(functools.partial(self.shared.__setitem__, places, data))

    def op_atom(self, parts, operands, mask):
        """An increment with a limit, by one thread after another."""
        assert parts[-2:] == ["inc", "u32"]
        limit, places = self.get(operands[2], "u32"), self.address(operands[1]) - _BASE
        before = np.zeros(THREADS, np.uint32)
        for thread in np.flatnonzero(mask):
            word = self.memory[places[thread] : places[thread] + 4].view(np.uint32)
            before[thread] = word[0]
            word[0] = 0 if word[0] >= limit[thread] else word[0] + 1
        self.put(operands[0], before, mask)

    def op_red(self, parts, operands, mask):
        """Bits that are set in shared memory, or a global counter, by one thread after another."""
        numbers = self.get(operands[1], "u32")
        memory, places = self.access(".".join(parts), operands[0])
        step = {
            "or": lambda x, y: x | y,
            "add": operator.add,
            "inc": lambda x, limit: 0 if x >= limit else x + 1,
        }[parts[-2]]
        for thread in np.flatnonzero(mask):
            word = memory[places[thread] : places[thread] + 4].view(np.uint32)
            word[0] = step(word[0], numbers[thread])

    def op_mov(self, parts, operands, mask):
        target, source = operands
        width = int(parts[-1][1:]) if parts[-1] != "pred" else 0
        if target.startswith("{"):
            names = [name.strip() for name in target.strip("{}").split(",")]
            part = width // len(names)
            bits = self.get(source, f"u{width}").astype(np.uint64)
            for i, name in enumerate(names):
                if name != "_":
                    self.put(name, bits >> np.uint64(i * part) & np.uint64(2**part - 1), mask)
        elif source.startswith("{"):
            names = [name.strip() for name in source.strip("{}").split(",")]
            part = width // len(names)
            total = np.zeros(THREADS, np.uint64)
            for i, name in enumerate(names):
                total |= self.get(name, f"u{part}").astype(np.uint64) << np.uint64(i * part)
            self.put(target, total, mask)
        elif source in ("%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z"):
            self.put(target, self.registers[source], mask)
        elif parts[-1] == "pred":
            known = self.registers.get(source)
            self.put(target, np.full(THREADS, source != "0") if known is None else known, mask)
        elif source.startswith(("0f", "0d")):
            self.put(target, self.get(source), mask)
        else:
            self.put(target, self.get(source, f"u{width}"), mask)

    def op_cvta(self, parts, operands, mask):
        self.put(operands[0], self.get(operands[1]), mask)

    def op_elect(self, parts, operands, mask):
        target, predicate = operands[0].split("|")
        self.put(target, np.zeros(THREADS, np.uint32), mask)
        self.put(predicate, _LANE == 0, mask)

    def op_shfl(self, parts, operands, mask):
        value, lane = self.get(operands[1], "u32"), self.get(operands[2], "u32").astype(np.int64)
        source = {"idx": lane, "bfly": _LANE ^ lane, "up": np.maximum(_LANE - lane, 0)}[parts[2]]
        source %= 32
        self.put(operands[0].split("|")[0], value[_THREAD.astype(np.int64) - _LANE + source], mask)

    def op_vote(self, parts, operands, mask):
        assert parts[1:] == ["sync", "ballot", "b32"]
        given = self.registers[operands[1]].astype(np.uint64) << _LANE.astype(np.uint64)
        self.put(operands[0], given.reshape(-1, 32).sum(axis=1).repeat(32).astype(np.uint32), mask)

    def op_redux(self, parts, operands, mask):
        numbers = self.get(operands[1], parts[-1]).reshape(-1, 32)
        found = {"min": np.min, "max": np.max, "add": np.sum}[parts[2]](numbers, axis=1)
        self.put(operands[0], np.repeat(found.astype(numbers.dtype), 32), mask)

    def op_setp(self, parts, operands, mask):
        kind = parts[-1]
        if kind == "pred":
            raise AssertionError(parts)
        a, b = (self.get(x, kind.replace("b", "u")) for x in operands[1:3])
        result = {
            "eq": np.equal,
            "ne": np.not_equal,
            "lt": np.less,
            "le": np.less_equal,
            "gt": np.greater,
            "ge": np.greater_equal,
            "lo": np.less,
            "hi": np.greater,
            "neu": np.not_equal,
            "num": lambda x, y: ~np.isnan(x) & ~np.isnan(y),
            "nan": lambda x, y: np.isnan(x) | np.isnan(y),
        }[parts[1]](a, b)
        if parts[2] in ("and", "or"):
            other = self.registers[operands[3].lstrip("!")] ^ operands[3].startswith("!")
            result = result & other if parts[2] == "and" else result | other
        self.put(operands[0], result, mask)

    def op_selp(self, parts, operands, mask):
        kind = parts[-1].replace("b", "u")
        a, b = (self.get(x, kind) for x in operands[1:3])
        self.put(operands[0], np.where(self.registers[operands[3]], a, b), mask)

    def op_not(self, parts, operands, mask):
        kind = parts[-1].replace("b", "u")
        source = self.registers[operands[1]] if kind == "pred" else self.get(operands[1], kind)
        self.put(operands[0], ~source, mask)

    def op_bfe(self, parts, operands, mask):
        value, start, count = (self.get(x, "u32") for x in operands[1:])
        self.put(operands[0], value >> start & (np.uint32(1) << count) - np.uint32(1), mask)

    def unary(self, parts, operands, mask, function):
        self.put(operands[0], function(self.get(operands[1], parts[-1])), mask)

    def shift(self, parts, operands, mask, function):
        a, b = self.get(operands[1], parts[-1].replace("b", "u")), self.get(operands[2], "u32")
        self.put(operands[0], function(a, b.astype(a.dtype)), mask)

    def arithmetic(self, parts, operands, mask, function):
        kind = parts[-1]
        if parts[-2:] == ["f32", "bf16"]:  # All operands but the last are bfloat16.
            *narrow, last = operands[1:]
            numbers = [_from_bfloat16(self.get(x, "u16")) for x in narrow] + [self.get(last, "f32")]
            exact = function(*(x.astype(np.float64) for x in numbers))
            self.put(operands[0], exact.astype(np.float32), mask)
            return
        if kind in ("bf16x2", "bf16"):
            sources = [self.get(x, "u32") for x in operands[1:]]
            halves = []
            for shift in (0, 16) if kind == "bf16x2" else (0,):
                numbers = [_from_bfloat16(x >> shift & 0xFFFF) for x in sources]
                # One rounding: the product and sum of bfloat16 fit float64.
                exact = function(*(x.astype(np.float64) for x in numbers))
                halves.append(_bfloat16(exact.astype(np.float32)) << np.uint64(shift))
            self.put(operands[0], sum(halves), mask)
            return
        if kind == "f32x2":
            pairs = [self.get(x).view(np.float32).reshape(THREADS, 2) for x in operands[1:]]
            exact = function(*(x.astype(np.float64) for x in pairs)).astype(np.float32)
            self.put(operands[0], np.ascontiguousarray(exact).view(np.uint64)[:, 0], mask)
            return
        if kind == "pred":
            numbers = [self.registers[x] for x in operands[1:]]
        else:
            numbers = [self.get(x, kind.replace("b", "u")) for x in operands[1:]]
        if kind == "f32" and len(numbers) == 3:  # fma
            result = function(*(x.astype(np.float64) for x in numbers)).astype(np.float32)
        else:
            result = function(*numbers)
        self.put(operands[0], result, mask)

    def product(self, parts, operands, mask):
        """A product that is wider than its factors, or its upper half; plus the third operand."""
        kind = parts[2]
        a, b = (self.get(x, kind).astype(f"{_INTEGERS[kind[0]]}8") for x in operands[1:3])
        total = a * b
        if parts[1] == "hi":
            total = (total >> 32).astype(f"{_INTEGERS[kind[0]]}4")
        elif operands[3:]:
            total += self.get(operands[3], f"{kind[0]}64")
        self.put(operands[0], total, mask)

    def op_prmt(self, parts, operands, mask):
        a, b, select = (self.get(x, "u32").astype(np.uint64) for x in operands[1:4])
        both = a | b << np.uint64(32)
        total = np.zeros(THREADS, np.uint64)
        for i in range(4):
            byte = select >> np.uint64(4 * i) & np.uint64(7)
            total |= (both >> (8 * byte) & np.uint64(0xFF)) << np.uint64(8 * i)
        self.put(operands[0], total.astype(np.uint32), mask)

    def op_shf(self, parts, operands, mask):
        low, high, left = (self.get(x, "u32").astype(np.uint64) for x in operands[1:4])
        both = low | high << np.uint64(32)
        assert parts[1:3] == ["l", "wrap"]
        self.put(operands[0], (both << left % 32 >> np.uint64(32)).astype(np.uint32), mask)

    def op_cvt(self, parts, operands, mask):
        to, kind = parts[-2:]
        if "x2" in to or "x2" in kind:
            self.convert_pair(to, kind, operands, mask)
            return
        if kind == "bf16":
            number = _from_bfloat16(self.get(operands[1], "u16"))
        elif kind == "f16":
            number = self.get(operands[1], "u16").view(np.float16).astype(np.float32)
        else:
            number = self.get(operands[1], kind)
        if to == "bf16":
            self.put(operands[0], _bfloat16(number).astype(np.uint16), mask)
        elif to == "f16":
            self.put(operands[0], number.astype(np.float16), mask)
        else:
            dtype = f"{_INTEGERS[to[0]]}{int(to[1:]) // 8}"
            self.put(operands[0], number.astype(dtype), mask)

    def convert_pair(self, to, kind, operands, mask):
        import ml_dtypes

        float8 = np.dtype(ml_dtypes.float8_e4m3fn)
        if kind == "f32":  # The first source is the upper half.
            upper, lower = (self.get(x, "f32") for x in operands[1:3])
            if to == "bf16x2":
                total = _bfloat16(lower) | _bfloat16(upper) << np.uint64(16)
                self.put(operands[0], total.astype(np.uint32), mask)
            else:
                assert to == "e4m3x2"
                low, high = (
                    np.clip(x, -448, 448).astype(float8).view(np.uint8).astype(np.uint16)
                    for x in (lower, upper)
                )
                self.put(operands[0], low | high << 8, mask)
        else:
            assert (to, kind) == ("f16x2", "e4m3x2"), (to, kind)
            pair = self.get(operands[1], "u16")
            low, high = (
                (pair >> s & 0xFF).astype(np.uint8).view(float8).astype(np.float16).view(np.uint16)
                for s in (0, 8)
            )
            self.put(operands[0], low.astype(np.uint32) | high.astype(np.uint32) << 16, mask)

    def first_operand(self, names):
        """That of a product, float64 [4, 16, 16] of the four warps."""
        a = [_halves(self.get(name, "u32").reshape(4, 8, 4)) for name in names]
        rows = [np.concatenate([a[i], a[i + 2]], axis=2) for i in (0, 1)]
        return np.concatenate(rows, axis=1)

    def op_mma(self, parts, operands, mask):
        def names(operand):
            return [name.strip() for name in operand.strip("{}").split(",")]

        assert "m16n8k16" in parts
        b = [self.get(name, "u32").reshape(4, 8, 4) for name in names(operands[2])]
        c = [self.get(name, "f32").reshape(4, 8, 4) for name in names(operands[3])]

        right = np.concatenate([_halves(x) for x in b], axis=2)
        product = self.first_operand(names(operands[1])) @ right.swapaxes(1, 2)
        for i, name in enumerate(names(operands[0])):
            part = product[:, 8 * (i // 2) :][:, :8, i % 2 :: 2]
            total = part + c[i].astype(np.float64)
            self.put(name, total.reshape(-1).astype(np.float32), mask)

    def op_wgmma(self, parts, operands, mask):
        """A product whose second operand is in shared memory, in chunks of 16 swizzled bytes."""
        if "mma_async" not in parts:
            return
        total, a = ([x.strip() for x in names.strip("{}").split(",")] for names in operands[:2])
        descriptor = int(self.get(operands[2])[0])
        assert descriptor >> 62 == 1, "expected a swizzle of 128 bytes"
        row = np.arange(2 * len(total))[:, None]
        places = ((descriptor & 0x3FFF) << 4) + row % 8 * 128 + np.arange(32)
        places += row // 8 * ((descriptor >> 32 & 0x3FFF) << 4)
        places ^= (places >> 7 & 7) << 4
        x = _from_bfloat16(self.shared[places].view(np.uint16)).astype(np.float64)
        product = self.first_operand(a) @ x.T
        for i, name in enumerate(total):
            part = product[:, i % 4 // 2 * 8 :][:, :8, i // 4 * 8 + i % 2 :][..., :8:2]
            self.put(name, (part.reshape(-1) + self.get(name, "f32")).astype(np.float32), mask)

    def op_movmatrix(self, parts, operands, mask):
        words = self.get(operands[1], "u32").reshape(4, 8, 4)
        halves = np.ascontiguousarray(words).view(np.uint16).swapaxes(1, 2)  # [4, 8, 8]
        turned = np.ascontiguousarray(halves).view(np.uint32)
        self.put(operands[0], turned.reshape(-1), mask)

    def op_stmatrix(self, parts, operands, mask):
        assert {"x1", "m8n8"} <= set(parts)
        assert mask.all()
        data = self.get(operands[1].strip("{} "), "u32").reshape(4, 8, 4)
        rows = self.address(operands[0]).reshape(4, 32)[:, :8]
        self.shared[rows[..., None] + np.arange(16)] = data.view(np.uint8)

    def op_ldmatrix(self, parts, operands, mask):
        names = [name.strip() for name in operands[0].strip("{}").split(",")]
        count = int(parts[4][1:])
        assert (len(names), "m8n8" in parts) == (count, True)
        places = self.address(operands[1]).reshape(4, 32)
        for i, name in enumerate(names):
            rows = places[:, 8 * i : 8 * i + 8]
            data = self.shared[rows[..., None] + np.arange(16)]  # [4, 8, 16] bytes
            halves = np.ascontiguousarray(data).view(np.uint16)  # [4, 8, 8]
            if "trans" in parts:
                halves = np.ascontiguousarray(halves.swapaxes(1, 2))
            self.put(name, halves.view(np.uint32).reshape(-1), mask)
