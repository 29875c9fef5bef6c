#include "convert.hpp"
#include "gil.hpp"
#include "module.hpp"

#include "paramwire/base/availability.hpp"
#include "paramwire/engine/engine.hpp"
#include "paramwire/server/available.hpp"

#include <utility>
#include <vector>

namespace paramwire::bindings {

namespace {

py::list rows(const std::vector<Availability>& lines) {
  py::list out;
  for (const Availability& line : lines) {
    out.append(py::dict(py::arg("name") = line.name, py::arg("usable") = line.usable, py::arg("reason") = line.reason, py::arg("next") = line.next));
  }
  return out;
}

py::dict available() {
  auto seams = without_gil([] {
    auto found = available_seams();
    found.push_back({"backends", available_backends()});
    return found;
  });
  py::dict out;
  for (const SeamAvailability& seam : seams) out[text(seam.seam)] = rows(seam.lines);
  return out;
}

py::dict build() {
  py::dict out;
  for (const auto& [name, version] : build_versions()) out[text(name)] = version;
  return out;
}

py::dict rdma_row(const PortFacts& port, const GidRow& row) {
  return py::dict(py::arg("index") = row.index, py::arg("gid") = to_string(row.gid), py::arg("type") = text(gid_type_name(row.type)),
                  py::arg("interface") = row.interface, py::arg("problem") = row_problem(port, row));
}

py::list rdma() {
  py::list out;
  for (const PortFacts& port : without_gil([] { return rdma_ports(); })) {
    py::list gids;
    for (const GidRow& row : port.gids) gids.append(rdma_row(port, row));
    out.append(py::dict(py::arg("device") = port.device, py::arg("port") = port.port, py::arg("link") = port.ethernet ? "Ethernet" : "InfiniBand",
                        py::arg("software") = port.software, py::arg("state") = port.state, py::arg("mtu") = port.mtu_active, py::arg("mtu_max") = port.mtu_max,
                        py::arg("message_bytes_max") = port.message_max, py::arg("reads_max") = port.reads_max, py::arg("problem") = port_problem(port),
                        py::arg("gids") = gids));
  }
  return out;
}

py::dict memory() {
  const MemoryRoom room = memory_room();
  return py::dict(py::arg("available_bytes") = room.available_bytes, py::arg("limit_bytes") = room.limit_bytes, py::arg("source") = room.source);
}

}  // namespace

void bind_available(py::module_& module) {
  module.def("available", &available);
  module.def("rdma_ports", &rdma);
  module.def("build_versions", &build);
  module.def("memory_room", &memory);
}

}  // namespace paramwire::bindings
