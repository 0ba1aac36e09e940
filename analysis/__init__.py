"""What reads reports. common/ comes first: it says in one line if a package is missing."""

import common as common
