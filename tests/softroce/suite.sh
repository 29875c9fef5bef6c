#!/bin/sh
# What `make softroce` runs in the guest, from the root of the tree: the verbs rows of the conformance suite, then the tests of this
# folder. JUnit files and the facts of the machine go to the folder given; more arguments go to pytest. Status 0 when all passed.
set -u
out=$1
shift
PATH=/usr/sbin:/usr/bin:/sbin:/bin:$PATH
{
  printf 'kernel %s (%s)\n' "$(uname -r)" "${PARAMWIRE_SOFTROCE:-here}"
  rdma link
} >"$out/machine.txt"
cat "$out/machine.txt"
status=0
build/dev/tests/transport_test --gtest_brief=1 --gtest_filter='*verbs_on_a_device*:*verbs_with_a_key*' \
  --gtest_output="xml:$out/conformance.xml" || status=1
PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 .venv/bin/python -m pytest tests/softroce -p no:cacheprovider \
  --junitxml="$out/pytest.xml" "$@" || status=1
exit $status
