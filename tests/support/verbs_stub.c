/* A libibverbs of one device that can't be opened, for tests of how the library is found: functions of the right names, no RDMA behind them.
   STUB_WITHOUT_REG_MR leaves one function out; STUB_FORK_TOO_LATE lets ibv_fork_init fail as after somebody's registration. */
#include <errno.h>
#include <stdlib.h>

static int the_device;

int ibv_fork_init(void) {
#ifdef STUB_FORK_TOO_LATE
  return EINVAL;
#else
  return 0;
#endif
}

void** ibv_get_device_list(int* count) {
  void** list = calloc(2, sizeof *list);
  if (list != NULL) list[0] = &the_device;
  if (count != NULL) *count = 1;
  return list;
}

void ibv_free_device_list(void** list) {
  free(list);
  errno = EINTR; /* as it may: nobody promises to leave it alone */
}

const char* ibv_get_device_name(void* device) { return device == &the_device ? "stub0" : "none"; }

void* ibv_open_device(void* device) {
  (void)device;
  errno = EACCES;
  return NULL;
}

#ifndef STUB_WITHOUT_REG_MR
void* ibv_reg_mr(void) { return NULL; }
#endif
void* ibv_alloc_pd(void) { return NULL; }
void* ibv_create_comp_channel(void) { return NULL; }
void* ibv_create_cq(void) { return NULL; }
void* ibv_create_qp(void) { return NULL; }
int ibv_close_device(void) { return -1; }
int ibv_query_device(void) { return ENOSYS; }
int ibv_query_port(void) { return ENOSYS; }
long _ibv_query_gid_table(void) { return -ENOSYS; }
int ibv_dealloc_pd(void) { return ENOSYS; }
int ibv_dereg_mr(void) { return ENOSYS; }
int ibv_destroy_comp_channel(void) { return ENOSYS; }
int ibv_destroy_cq(void) { return ENOSYS; }
int ibv_get_cq_event(void) { return -1; }
void ibv_ack_cq_events(void) {}
int ibv_modify_qp(void) { return ENOSYS; }
int ibv_destroy_qp(void) { return ENOSYS; }
