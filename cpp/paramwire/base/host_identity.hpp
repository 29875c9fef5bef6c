// Tells whether two processes run on the same booted host, in the same network namespace: whether a unix socket path of one
// means anything to the other.
#pragma once

#include <string>

namespace paramwire {

// "boot id/inode of the network namespace" (random(4), namespaces(7)); empty when either can't be read, which equals nothing.
// Any thread.
std::string host_identity();

}  // namespace paramwire
