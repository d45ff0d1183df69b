"""The papers' tables and figures, each a function that returns rows with the paper's figure beside ours."""
