import pytest

pytest.register_assert_rewrite("policies.conversation", "policies.any_driver")
