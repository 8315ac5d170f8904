"""The system calls that a graded program may make, with their numbers."""

from __future__ import annotations

FILES = """
read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70 lseek:8:62
close:3:57 close_range:436:436 dup:32:23 dup2:33:- dup3:292:24 pipe:22:- pipe2:293:59 flock:73:32 fsync:74:82
fdatasync:75:83 sendfile:40:71 stat:4:- fstat:5:80 lstat:6:- newfstatat:262:79 statx:332:291 access:21:-
faccessat:269:48 faccessat2:439:439 getdents:78:- getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50
readlink:89:- readlinkat:267:78 umask:95:166 statfs:137:43 fstatfs:138:44 getxattr:191:8 lgetxattr:192:9
fgetxattr:193:10 listxattr:194:11 llistxattr:195:12 flistxattr:196:13
"""
FILE_CHANGES = """
ftruncate:77:46 truncate:76:45 fallocate:285:47 copy_file_range:326:285 creat:85:- mkdir:83:- mkdirat:258:34
rmdir:84:- unlink:87:- unlinkat:263:35 rename:82:- renameat:264:38 renameat2:316:276 link:86:- linkat:265:37
symlink:88:- symlinkat:266:36 chmod:90:- fchmod:91:52 fchmodat:268:53 utime:132:- utimes:235:- futimesat:261:-
utimensat:280:88
"""
"""Only where there is a folder of the program's own: elsewhere these could change files that it cannot even open."""
WAITING = """
poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create:213:- epoll_create1:291:20 epoll_ctl:233:21
epoll_wait:232:- epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284:- eventfd2:290:19 recvfrom:45:207 sendmsg:46:211
recvmsg:47:212 shutdown:48:210 getsockopt:55:209 getsockname:51:204 getpeername:52:205 clock_gettime:228:113
clock_getres:229:114 clock_nanosleep:230:115 nanosleep:35:101 gettimeofday:96:169 time:201:- alarm:37:-
setitimer:38:103 getitimer:36:102 pause:34:-
"""
MEMORY_AND_THREADS = """
mmap:9:222 munmap:11:215 mprotect:10:226 mremap:25:216 madvise:28:233 brk:12:214 msync:26:227 mincore:27:232
membarrier:324:283 futex:202:98 futex_waitv:449:449 set_robust_list:273:99 get_robust_list:274:100 rseq:334:293
set_tid_address:218:96 arch_prctl:158:- sched_yield:24:124 sched_getaffinity:204:123 sched_getparam:143:121
sched_getscheduler:145:120 sched_get_priority_max:146:125 sched_get_priority_min:147:126
"""
PROCESS = """
gettid:186:178 getpid:39:172 getppid:110:173 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177
getresuid:118:148 getresgid:120:150 getgroups:115:158 getpgrp:111:- getpgid:121:155 getsid:124:156 uname:63:160
sysinfo:99:179 getrlimit:97:163 setrlimit:160:164 getrusage:98:165 times:100:153 getcpu:309:168 getrandom:318:278
getpriority:140:141 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 sigaltstack:131:132
rt_sigpending:127:136 rt_sigsuspend:130:133 rt_sigtimedwait:128:137 restart_syscall:219:128 wait4:61:260
waitid:247:95 exit:60:93 exit_group:231:94
"""
CHECKED = """
clone:56:220 fcntl:72:25 ioctl:16:29 kill:62:129 open:2:- openat:257:56 prctl:157:167 prlimit64:302:261 sendto:44:206
socketpair:53:199 tgkill:234:131
"""
"""Allowed for some arguments only; the rules are in seccomp.py."""

MACHINES = {"x86_64": 0, "aarch64": 1}
"""The machines with a column in the tables: ``name:x86_64:aarch64``, ``-`` where the call does not exist."""


def numbers(table: str, machine: str) -> dict[str, int]:
    """The numbers of a table's system calls on one machine.

    >>> numbers("dup:32:23 dup2:33:-", "aarch64")
    {'dup': 23}
    """
    rows = [row.split(":") for row in table.split()]
    column = MACHINES[machine] + 1
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}
