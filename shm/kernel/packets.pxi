# --- packets of a Unix socket, several with one system call ------------------------------------------

from cpython.exc cimport PyErr_SetFromErrno

cdef extern from *:
    """
    #include <sys/socket.h>
    #include <sys/uio.h>
    """
    struct iovec:
        void *iov_base
        size_t iov_len
    struct msghdr:
        iovec *msg_iov
        size_t msg_iovlen
    struct mmsghdr:
        msghdr msg_hdr
        unsigned int msg_len
    int recvmmsg(int fd, mmsghdr *headers, unsigned count, int flags, void *timeout) nogil
    int sendmmsg(int fd, mmsghdr *headers, unsigned count, int flags) nogil
    enum:
        MSG_DONTWAIT
        MSG_NOSIGNAL

cdef enum:
    AT_ONCE = 64

PACKETS_AT_ONCE = AT_ONCE


@cython.final
cdef class PacketReader:
    """Takes packets that lie in a socket (SOCK_SEQPACKET). Its memory is touched as far as packets
    fill it.

    Args:
        size_max: bytes; what is longer is cut off there.
    """

    cdef uint8_t *_memory
    cdef size_t _size_max

    def __cinit__(self, size_t size_max):
        self._size_max = size_max
        self._memory = <uint8_t *>PyMem_Malloc(AT_ONCE * size_max)
        if self._memory == NULL:
            raise MemoryError

    def __dealloc__(self):
        PyMem_Free(self._memory)

    def take(self, int fd, Py_ssize_t count_max):
        cdef mmsghdr headers[AT_ONCE]
        cdef iovec parts[AT_ONCE]
        cdef int wanted = <int>max(0, min(count_max, <Py_ssize_t>AT_ONCE)), found, i
        cdef list packets = []
        memset(headers, 0, sizeof(headers))
        for i in range(wanted):
            parts[i].iov_base = self._memory + i * self._size_max
            parts[i].iov_len = self._size_max
            headers[i].msg_hdr.msg_iov = &parts[i]
            headers[i].msg_hdr.msg_iovlen = 1
        found = recvmmsg(fd, headers, wanted, MSG_DONTWAIT, NULL)
        if found < 0:
            if errno == EAGAIN:
                return packets
            PyErr_SetFromErrno(OSError)
        for i in range(found):
            packets.append(PyBytes_FromStringAndSize(
                <char *>parts[i].iov_base, headers[i].msg_len))
            if headers[i].msg_len == 0:  # the end, which is found as often as one asks
                break
        return packets


def send_packets(int fd, tuple packets not None):
    cdef mmsghdr headers[AT_ONCE]
    cdef iovec parts[AT_ONCE]
    cdef Py_ssize_t done = 0, count = len(packets)
    cdef int some, sent, i
    memset(headers, 0, sizeof(headers))
    while done < count:
        some = <int>min(count - done, <Py_ssize_t>AT_ONCE)
        for i in range(some):
            packet = packets[done + i]
            if not PyBytes_CheckExact(packet):
                raise TypeError(f"a packet is bytes, not {type(packet).__name__}")
            parts[i].iov_base = PyBytes_AS_STRING(packet)
            parts[i].iov_len = PyBytes_GET_SIZE(packet)
            headers[i].msg_hdr.msg_iov = &parts[i]
            headers[i].msg_hdr.msg_iovlen = 1
        sent = sendmmsg(fd, headers, some, MSG_DONTWAIT | MSG_NOSIGNAL)
        if sent < 0:
            PyErr_SetFromErrno(OSError)
        done += sent
