"""The numbers of a classification head."""

import attrs
import numpy as np
from numpy.typing import NDArray


@attrs.frozen(eq=False)
class ClassificationHead:
    """What is made of one token's hidden state: a matrix, [outputs, inputs], or two with an activation between."""

    output: NDArray[np.float32]
    """[labels, hidden_size]."""
    output_bias: NDArray[np.float32] | None = None
    dense: NDArray[np.float32] | None = None
    """Before `output`, [hidden_size, hidden_size]."""
    dense_bias: NDArray[np.float32] | None = None
