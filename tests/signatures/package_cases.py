"""Small packages that Python can import, and what is to be read of `pkg.f` in each."""

from __future__ import annotations

import re
import textwrap

INIT = "pkg/__init__.py"

# name: (source of pkg/__init__.py and, after `--- name`, of other files; recorded form of pkg.f, None if it is absent)
PLAIN: dict[str, tuple[str, str | None]] = {
    "in the package itself": (
        """
        def f(a, b=1): ...
        """,
        "pkg(a, b=1)",
    ),
    "nothing": (
        """
        g = 1
        """,
        None,
    ),
    "assigned None": (
        """
        f = None
        """,
        None,
    ),
    "one level up": (
        """
        from .sub.deep import f
        --- sub/__init__.py
        --- sub/deep.py
        from ..core import f
        --- core.py
        def f(a): ...
        """,
        "pkg.core(a)",
    ),
    "two levels up from a package": (
        """
        from .one.two import f
        --- one/__init__.py
        --- one/two/__init__.py
        from ...core import f
        --- core.py
        def f(a): ...
        """,
        "pkg.core(a)",
    ),
    "absolute import": (
        """
        from pkg.core import f
        --- core.py
        def f(a): ...
        """,
        "pkg.core(a)",
    ),
    "aliases": (
        """
        from .core import second as f
        --- core.py
        from .deep import first as second
        --- deep.py
        def _g(a): ...
        first = _g
        """,
        "pkg.deep(a)",
    ),
    "assigned in a tuple": (
        """
        def _f(a): ...
        def _g(b): ...
        (f, g) = (_f, _g)
        """,
        "pkg(a)",
    ),
    "chained assignment": (
        """
        def _f(a): ...
        f = g = _f
        """,
        "pkg(a)",
    ),
    "annotated alias": (
        """
        def _f(a): ...
        f: object = _f
        """,
        "pkg(a)",
    ),
    "annotation without a value": (
        """
        def f(a): ...
        f: object
        """,
        "pkg(a)",
    ),
    "star import": (
        """
        from .core import *
        --- core.py
        def f(a): ...
        """,
        "pkg.core(a)",
    ),
    "star imports chained": (
        """
        from .one import *
        --- one.py
        from .two import *
        --- two.py
        def f(a): ...
        """,
        "pkg.two(a)",
    ),
    "the later star import wins": (
        """
        from .one import *
        from .two import *
        --- one.py
        def f(a): ...
        --- two.py
        def f(b): ...
        """,
        "pkg.two(b)",
    ),
    "star import leaves out what __all__ does not list": (
        """
        from .core import *
        --- core.py
        __all__ = ['g']
        def f(a): ...
        def g(): ...
        """,
        None,
    ),
    "star import gives what __all__ lists": (
        """
        from .core import *
        --- core.py
        __all__ = ['f']
        def f(a): ...
        """,
        "pkg.core(a)",
    ),
    "star import with a computed __all__": (
        """
        from .core import *
        --- core.py
        __all__ = ['g']
        __all__ += ['f']
        def f(a): ...
        def g(): ...
        """,
        "pkg.core(a)",
    ),
    "star import before an own definition": (
        """
        from .core import *
        def f(b): ...
        --- core.py
        def f(a): ...
        """,
        "pkg(b)",
    ),
    "the last definition wins": (
        """
        def f(a): ...
        def f(b): ...
        """,
        "pkg(b)",
    ),
    "an import replaces a definition": (
        """
        def f(a): ...
        from .core import f
        --- core.py
        def f(b): ...
        """,
        "pkg.core(b)",
    ),
    "a definition replaces an import": (
        """
        from .core import f
        def f(a): ...
        --- core.py
        def f(b): ...
        """,
        "pkg(a)",
    ),
    "overloads": (
        """
        from typing import overload
        @overload
        def f(a: int) -> int: ...
        @overload
        def f(a: str) -> str: ...
        def f(a, b=2): return a
        """,
        "pkg(a, b=2)",
    ),
    "try with a fallback": (
        """
        try:
            from .core import f
        except ImportError:
            f = None
        --- core.py
        def f(a): ...
        """,
        "pkg.core?(a)",
    ),
    "missing module under try": (
        """
        try:
            from .absent import f
        except ImportError:
            pass
        """,
        None,
    ),
    "fallback defined in the handler": (
        """
        try:
            import sys
        except ImportError:
            def f(b): ...
        else:
            def f(a): ...
        """,
        "pkg?(a)",
    ),
    "finally": (
        """
        try:
            pass
        finally:
            def f(a): ...
        """,
        "pkg?(a)",
    ),
    "if taken": (
        """
        import sys
        if sys.version_info > (3,):
            def f(a): ...
        else:
            def f(b): ...
        """,
        "pkg?(a)",
    ),
    "nested conditions": (
        """
        import sys
        if sys:
            try:
                if sys.path is not None:
                    from .core import f
            except ImportError:
                pass
        --- core.py
        def f(a): ...
        """,
        "pkg.core?(a)",
    ),
    "conditional in the middle of a chain": (
        """
        from .core import f
        --- core.py
        if True:
            from .deep import f
        --- deep.py
        def f(a): ...
        """,
        "pkg.deep?(a)",
    ),
    "conditional star import": (
        """
        try:
            from .core import *
        except ImportError:
            pass
        --- core.py
        def f(a): ...
        """,
        "pkg.core?(a)",
    ),
    "suppressed exceptions": (
        """
        import contextlib
        with contextlib.suppress(ImportError):
            from .core import f
        --- core.py
        def f(a): ...
        """,
        "pkg.core?(a)",
    ),
    "other with blocks": (
        """
        import warnings
        with warnings.catch_warnings():
            from .core import f
        --- core.py
        def f(a): ...
        """,
        "pkg.core(a)",
    ),
    "TYPE_CHECKING": (
        """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from .absent import f
        else:
            def f(a): ...
        """,
        "pkg(a)",
    ),
    "typing.TYPE_CHECKING": (
        """
        import typing
        def f(a): ...
        if typing.TYPE_CHECKING:
            from .absent import f
        """,
        "pkg(a)",
    ),
    "not TYPE_CHECKING": (
        """
        import typing as t
        if not t.TYPE_CHECKING:
            from .core import f
        else:
            from .absent import f
        --- core.py
        def f(a): ...
        """,
        "pkg.core(a)",
    ),
    "TYPE_CHECKING only": (
        """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            def f(a): ...
        """,
        None,
    ),
    "TYPE_CHECKING as one of two conditions": (
        """
        import sys, typing
        if typing.TYPE_CHECKING or sys:
            def f(a): ...
        """,
        "pkg?(a)",
    ),
    "decorators over lines": (
        """
        def mark(*args, **kwargs):
            return lambda function: function


        @mark(
            1,
            key=[
                'def f(z): ...',
            ],
        )
        # between
        @mark()

        def f(
            a,
            b=(
                1
            ),
        ):
            return a
        """,
        "pkg(a, b=1)",
    ),
    "arguments at column 0": (
        """
        def f(
        a,
        b=1,
        ):
            return a
        def g(): ...
        """,
        "pkg(a, b=1)",
    ),
    "brackets closed at column 0": (
        """
        def g():
            return [
        1,
        len
        ]
        def f(a): ...
        """,
        "pkg(a)",
    ),
    "matrix product at column 0 before a decorator": (
        """
        def g(x, y): return (x
        @ y)
        @staticmethod
        def h(): ...
        def f(a): ...
        """,
        "pkg(a)",
    ),
    "f-strings": (
        """
        x = {'a': 1}
        g = f"{x['a']!r:>{10}} {{def}} {'#'}"
        h = f'''
        def f({x}): ...
        '''
        def f(a): return f'{a}'
        """,
        "pkg(a)",
    ),
    "line continuations": (
        r"""
        g = 1 + \
        2
        from .core import \
        h as \
        f
        def z(): return \
        1
        --- core.py
        def h(a): ...
        """,
        "pkg.core(a)",
    ),
    "a body after a continuation": (
        r"""
        def f(a): \
        pass
        def g(b): return 1 + \
        f(b)
        """,
        "pkg(a)",
    ),
    "a string continued over lines": (
        r"""
        g = 'a \
        def f(wrong): ...'
        def f(a): ...
        """,
        "pkg(a)",
    ),
    "unicode": (
        r"""
        größe = 1
        def f(größe, b='—\u2028'): ...
        ß = 2
        """,
        "pkg(größe, b='—\\u2028')",
    ),
    "soft keywords as names": (
        """
        def f(match): ...
        case = match = type = f
        """,
        "pkg(match)",
    ),
    "match statement": (
        """
        def f(a): ...
        match 1:
            case 1:
                x = 1
            case _:
                pass
        """,
        "pkg(a)",
    ),
    "a statement that starts with a bracket": (
        """
        def g(a): ...
        (f) = g
        """,
        "pkg(a)",
    ),
    "a method of the same name": (
        """
        class A:
            def f(self, wrong): ...
            class B:
                def f(self): ...
        def f(a): ...
        """,
        "pkg(a)",
    ),
    "a nested function of the same name": (
        """
        def f(a):
            def f(wrong): ...
            return f
        """,
        "pkg(a)",
    ),
    "asynchronous": (
        """
        async def f(a): ...
        """,
        "pkg(a)",
    ),
    "import cycle that resolves": (
        """
        from .one import f
        --- one.py
        def f(a): ...
        from . import two
        --- two.py
        from .one import f
        """,
        "pkg.one(a)",
    ),
    "every kind of parameter": (
        """
        def f(a, /, b, c=1, *args, d, e=None, **options): ...
        """,
        "pkg(a, /, b, c=1, *args, d, e=None, **options)",
    ),
    "keyword-only without a starred parameter": (
        """
        def f(a=1, /, *, b): ...
        """,
        "pkg(a=1, /, *, b)",
    ),
    "no parameters": (
        """
        def f(): ...
        """,
        "pkg()",
    ),
    "literal defaults": (
        """
        def f(a=-1, b=1.5, c='x', d=(), e=True, g=None, h=0x10, i=1_000): ...
        """,
        "pkg(a=-1, b=1.5, c='x', d=(), e=True, g=None, h=16, i=1000)",
    ),
    "defaults from constants elsewhere": (
        """
        from .core import *
        from .core import _HIDDEN as G
        H = G
        def f(a=LIMIT, b=G, c=H, d=FIRST): ...
        --- core.py
        LIMIT = 4096
        _HIDDEN = 'x'
        FIRST, SECOND = 1, 2
        """,
        "pkg(a=4096, b='x', c='x', d=1)",
    ),
    "objects as defaults": (
        """
        class Config:
            LIMIT = 8
        _UNSET = object()
        def f(a=_UNSET, b=len, c={}, d=Config, e=Config.LIMIT, g=2 ** 3): ...
        """,
        "pkg(a=<object>, b=<object>, c={}, d=<object>, e=<object>, g=<object>)",
    ),
    "enumerations as defaults": (
        """
        from .enums import E as Renamed
        def f(a=Renamed.Two, b=Renamed.Two.value): ...
        --- enums.py
        import enum
        class E(enum.IntEnum):
            One = (1,)
            Two = (2,)
        """,
        "pkg(a=E.Two, b=2)",
    ),
    "literal choices": (
        """
        import typing
        from typing import Literal
        def f(a: Literal['x', 'y'] = 'x', b: typing.Literal['z'] = 'z', c: 'Literal["p"]' = 'p', d: int = 1): ...
        """,
        "pkg(a: Literal['x', 'y']='x', b: Literal['z']='z', c: Literal['p']='p', d=1)",
    ),
    "literal choices with postponed annotations": (
        """
        from __future__ import annotations
        from typing import Literal
        def f(a: Literal['x', 'y'] = 'x'): ...
        """,
        "pkg(a: Literal['x', 'y']='x')",
    ),
    "class with a constructor": (
        """
        class f:
            def __init__(self, a, *, b=1): ...
        """,
        "pkg(a, *, b=1)",
    ),
    "class without a constructor": (
        """
        class f:
            a = 1
            b: int = 2
        """,
        "pkg()",
    ),
    "overloaded constructor": (
        """
        from typing import overload
        class f:
            @overload
            def __init__(self, a: int): ...
            @overload
            def __init__(self, a: str): ...
            def __init__(self, a, b=1): ...
        """,
        "pkg(a, b=1)",
    ),
    "constructor without a named instance": (
        """
        class f:
            def __init__(*args, **kw): ...
        """,
        "pkg(*args, **kw)",
    ),
    "inherited constructor": (
        """
        from .base import Base
        class f(Base):
            x = 1
        --- base.py
        class Base:
            def __init__(self, a): ...
        """,
        "pkg(a)",
    ),
    "constructor of the second base": (
        """
        class Mixin:
            x = 1
        class Base:
            def __init__(self, a): ...
        class f(Mixin, Base): ...
        """,
        "pkg(a)",
    ),
    "dataclass": (
        """
        from dataclasses import dataclass, field
        from typing import ClassVar
        @dataclass(frozen=True)
        class f:
            a: int
            b: int = 1
            c: list = field(default_factory=list)
            d: int = field(default=3)
            e: int = field(init=False)
            g: ClassVar[int] = 4
            h: 'ClassVar[int]' = 5
            i = 6
            j: int = field(default=7, kw_only=True)
            k: int = 8
        """,
        "pkg(a, b=1, c=<factory>, d=3, k=8, *, j=7)",
    ),
    "dataclass with KW_ONLY": (
        """
        import dataclasses
        @dataclasses.dataclass
        class f:
            a: int
            _: dataclasses.KW_ONLY
            b: int
            c: int = dataclasses.field(kw_only=False)
        """,
        "pkg(a, c, *, b)",
    ),
    "dataclass with postponed annotations": (
        """
        from __future__ import annotations
        from dataclasses import KW_ONLY, dataclass, InitVar
        import typing
        @dataclass
        class f:
            a: InitVar[int]
            b: typing.ClassVar = 1
            _: KW_ONLY
            c: dict[str, int] | None = None
        """,
        "pkg(a, *, c=None)",
    ),
    "dataclass with keyword-only fields": (
        """
        from dataclasses import dataclass
        @dataclass(kw_only=True)
        class f:
            a: int = 1
            b: int
        """,
        "pkg(*, a=1, b)",
    ),
    "dataclass without a generated constructor": (
        """
        from dataclasses import dataclass
        @dataclass(init=False)
        class f:
            a: int
        """,
        "pkg()",
    ),
    "dataclass with its own constructor": (
        """
        from dataclasses import dataclass
        @dataclass
        class f:
            a: int
            def __init__(self, b): ...
        """,
        "pkg(b)",
    ),
    "dataclass inheritance": (
        """
        from dataclasses import dataclass, field
        from .base import Base
        @dataclass
        class f(Base):
            b: int = 20
            c: int = 3
        --- base.py
        from dataclasses import dataclass
        @dataclass
        class Base:
            a: int
            b: int = 2
        """,
        "pkg(a, b=20, c=3)",
    ),
    "dataclass field withdrawn by a subclass": (
        """
        from dataclasses import dataclass, field
        @dataclass
        class Base:
            a: int
            b: int = 2
        @dataclass
        class f(Base):
            b: int = field(default=3, init=False)
        """,
        "pkg(a)",
    ),
    "dataclass of two bases": (
        """
        from dataclasses import dataclass
        @dataclass
        class A:
            a: int
        @dataclass
        class B:
            b: int
        @dataclass
        class f(A, B):
            c: int
        """,
        "pkg(b, a, c)",
    ),
    "dataclass from a plain class with a constructor": (
        """
        from dataclasses import dataclass
        class Base:
            x: int = 0
            def __init__(self, x): ...
        @dataclass
        class f(Base):
            a: int
        """,
        "pkg(a)",
    ),
    "plain subclass of a dataclass": (
        """
        from dataclasses import dataclass
        @dataclass
        class Base:
            a: int
        class f(Base):
            b: int = 1
        """,
        "pkg(a)",
    ),
    "dataclass over a plain subclass": (
        """
        from dataclasses import dataclass
        @dataclass
        class Base:
            a: int
        class Middle(Base):
            b: int = 1
        @dataclass
        class f(Middle):
            c: int = 2
        """,
        "pkg(a, c=2)",
    ),
    "names that only look like dataclasses": (
        """
        def register_dataclass(x): return x
        @register_dataclass
        class f:
            a: int = 1
        """,
        "pkg()",
    ),
    "calls that only look like fields": (
        """
        from dataclasses import dataclass
        def subfield(**kw): return 1
        @dataclass
        class f:
            a: int = subfield(init=False)
        """,
        "pkg(a=<object>)",
    ),
    "enumeration": (
        """
        from enum import IntEnum
        class f(IntEnum):
            '''Doc.'''
            A = (0,)
            B = 1
            C = (-2,)
            Alias = B
            Same = 1
            D: int = 4
            E = F = 5
            @property
            def x(self): return 1
        """,
        "pkg{A=0, B=1, C=-2, Alias=1, Same=1, D=4, E=5, F=5}",
    ),
    "enumeration of strings": (
        """
        import enum
        class f(str, enum.Enum):
            A = 'a(b'
            B = 'c'
        """,
        "pkg{A='a(b', B='c'}",
    ),
    "enumeration with its own base": (
        """
        from .base import Base
        class f(Base):
            A = 1
        --- base.py
        import enum
        class Base(enum.Enum):
            def x(self): ...
        """,
        "pkg{A=1}",
    ),
    "enumeration with reserved names": (
        """
        import enum
        class f(enum.IntEnum):
            _ignore_ = ['x']
            __slots__ = ()
            A = 1
        """,
        "pkg{A=1}",
    ),
    "empty enumeration": (
        """
        import enum
        class f(enum.Enum):
            pass
        """,
        "pkg{}",
    ),
}

# The same with the characters that matter written out.
ODD: dict[str, tuple[dict[str, str | bytes], str | None]] = {
    "definition text in a string at column 0": (
        {
            "pkg/__init__.py": 'TEXT = """\n'
            "def f(wrong): ...\n"
            '"""\n'
            "def f(a):\n"
            "    '''Doc.\n"
            "def f(also_wrong): ...\n"
            "    '''\n"
            '    return """\n'
            "def f(no): ...\n"
            '"""\n'
        },
        "pkg(a)",
    ),
    "only in a string": (
        {"pkg/__init__.py": 'TEXT = """\ndef f(wrong): ...\n"""\n'},
        None,
    ),
    "quotes in comments and escapes": (
        {
            "pkg/__init__.py": '# it\'s """ here\n'
            "g = 'it\\'s'  # '''\n"
            "h = r'\\\\'  '\"\"\"'\n"
            'def f(a, b=\'"""\', c="\'"): ...  # \'\n'
        },
        'pkg(a, b=\'"""\', c="\'")',
    ),
    "form feeds": (
        {"pkg/__init__.py": "def g(): ...\n\x0c\ndef h(): ...\n\x0cdef f(a): ...\n  \x0c@staticmethod\ndef i(): ...\n"},
        "pkg(a)",
    ),
    "carriage returns": (
        {
            "pkg/__init__.py": b"x = '''\r\n"
            b"def f(wrong): ...\r\n"
            b"'''\r\n"
            b"def f(a,\r\n"
            b"      b='q\\\r\n"
            b"r'):\r\n"
            b"    return a\r\n"
        },
        "pkg(a, b='qr')",
    ),
    "old Macintosh line ends": (
        {"pkg/__init__.py": b"def g(): ...\rdef f(a): ...\r"},
        "pkg(a)",
    ),
    "mixed line ends": (
        {"pkg/__init__.py": b"def g(): ...\rdef f(a): ...\ndef h(): ...\r\n"},
        "pkg(a)",
    ),
    "byte order mark": (
        {"pkg/__init__.py": b"\xef\xbb\xbfdef f(a): ...\n"},
        "pkg(a)",
    ),
    "declared encoding": (
        {"pkg/__init__.py": b"# -*- coding: latin-1 -*-\ndef f(a='\xe9'): ...\n"},
        "pkg(a='é')",
    ),
    "tabs": (
        {"pkg/__init__.py": "class A:\n\tdef f(self, wrong): ...\nif True:\n\tpass\ndef f(a):\n\treturn a\n"},
        "pkg(a)",
    ),
    "no newline at the end": (
        {"pkg/__init__.py": "x = 1\ndef f(a): return a"},
        "pkg(a)",
    ),
}


def files_of(sources: str) -> dict[str, str | bytes]:
    first, *others = re.split(r"^--- (.+)\n", textwrap.dedent(sources).removeprefix("\n"), flags=re.MULTILINE)
    return {INIT: first, **{f"pkg/{name}": content for name, content in zip(others[::2], others[1::2], strict=True)}}


IMPORTABLE = {**{name: (files_of(sources), expected) for name, (sources, expected) in PLAIN.items()}, **ODD}
