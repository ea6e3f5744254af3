from thunder import Tensor  # noqa: F401
