"""Look for known vulnerabilities in the packages of this environment, with pip-audit and the OSV database.

python scripts/audit.py [--if-reachable] [--database URL]

pip-audit gets an environment of its own, so that it changes nothing here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import tempfile
import urllib.error
import urllib.request
import venv
from pathlib import Path

DATABASE = "https://api.osv.dev"
SECONDS = 5.0  # for the database to answer


def main() -> None:
    """Audit the packages. The exit code is 1 if one has a known vulnerability, or if they cannot be audited."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--if-reachable", action="store_true", help="succeed if the database cannot be reached")
    parser.add_argument("--database", default=DATABASE, help="the address of the OSV database")
    asked = parser.parse_args()
    if not answers(asked.database):
        print(f"{asked.database} cannot be reached, so no package was audited.")
        sys.exit(0 if asked.if_reachable else 1)
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "pip-audit>=2.8")
        subprocess.run(pip, check=True)
        packages = sysconfig.get_path("purelib")
        audit = (python, "-m", "pip_audit", "--vulnerability-service", "osv", "--path", packages, "--skip-editable")
        sys.exit(subprocess.run(audit, check=False).returncode)


def answers(database: str) -> bool:
    """Return whether a server answers at this address, with whatever status."""
    try:
        urllib.request.urlopen(database, timeout=SECONDS).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
