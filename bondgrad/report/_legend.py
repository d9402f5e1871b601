"""How the numbers in tables are to be read, for the page and for documents."""

LEGEND = (
    "Ours are means over seeds; ± behind a mean is the standard deviation over seeds, where there are several. "
    "(steps ± ...) is the standard deviation over single training steps. "
    "The paper's deviations are shown as one or the other, as far as it is known which they are."
)
TIMES = (
    "The paper's times, and its ratios of times, were taken on another machine than ours: "
    "they are named with it and no difference is formed."
)
