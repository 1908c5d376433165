package oci

import (
	"runtime"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// seccompProfile is an allow list: whatever it does not name answers ENOSYS,
// with which C libraries fall back to older calls, or EPERM where a program
// asks for something that is refused on purpose. Foreign system call tables
// (32 bit, x32) are not in it and end the caller.
//
// Beside what ordinary programs need it allows what Chrome's own confinement
// is built of: user, pid and network namespaces by clone and unshare, chroot,
// seccomp. It has no mounts, so those namespaces can do little else.
func seccompProfile() *specs.LinuxSeccomp {
	enosys, eperm := uint(unix.ENOSYS), uint(unix.EPERM)
	profile := &specs.LinuxSeccomp{
		DefaultAction:   specs.ActErrno,
		DefaultErrnoRet: &enosys,
		Architectures:   []specs.Arch{nativeArch()},
		Syscalls: []specs.LinuxSyscall{
			{Names: strings.Fields(allowedCalls), Action: specs.ActAllow},
			{Names: strings.Fields(refusedCalls), Action: specs.ActErrno, ErrnoRet: &eperm},
			// clone3 keeps its flags in memory, where no filter sees them.
			{Names: []string{"clone3"}, Action: specs.ActErrno, ErrnoRet: &enosys},
			whenMasked("clone", forbiddenNamespaces, 0),
			// unshare alone: in clone this bit is part of the exit signal.
			whenMasked("unshare", forbiddenNamespaces|unix.CLONE_NEWTIME, 0),
		},
	}
	for _, family := range []uint64{unix.AF_UNIX, unix.AF_INET, unix.AF_INET6} {
		profile.Syscalls = append(profile.Syscalls, whenEqual("socket", family))
	}
	// No netfilter: it is the part of the kernel that user namespaces have
	// been a way into most often.
	for _, protocol := range []uint64{unix.NETLINK_ROUTE, unix.NETLINK_SOCK_DIAG, unix.NETLINK_AUDIT, unix.NETLINK_KOBJECT_UEVENT} {
		profile.Syscalls = append(profile.Syscalls, specs.LinuxSyscall{Names: []string{"socket"}, Action: specs.ActAllow,
			Args: []specs.LinuxSeccompArg{
				{Index: 0, Value: unix.AF_NETLINK, Op: specs.OpEqualTo},
				{Index: 2, Value: protocol, Op: specs.OpEqualTo},
			}})
	}
	// Linux, Linux 32 and both without address randomisation (debuggers); query.
	for _, persona := range []uint64{0, 0x8, 0x20000, 0x20008, 0x40000, 0xffffffff} {
		profile.Syscalls = append(profile.Syscalls, whenEqual("personality", persona))
	}
	return profile
}

// forbiddenNamespaces are those that Chrome's confinement does without.
const forbiddenNamespaces = unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWCGROUP

func whenEqual(call string, value uint64) specs.LinuxSyscall {
	return specs.LinuxSyscall{Names: []string{call}, Action: specs.ActAllow,
		Args: []specs.LinuxSeccompArg{{Index: 0, Value: value, Op: specs.OpEqualTo}}}
}

// whenMasked allows a call where its first argument under mask is want.
func whenMasked(call string, mask, want uint64) specs.LinuxSyscall {
	return specs.LinuxSyscall{Names: []string{call}, Action: specs.ActAllow,
		Args: []specs.LinuxSeccompArg{{Index: 0, Value: mask, ValueTwo: want, Op: specs.OpMaskedEqual}}}
}

func nativeArch() specs.Arch {
	if runtime.GOARCH == "arm64" {
		return specs.ArchAARCH64
	}
	return specs.ArchX86_64
}

const allowedCalls = `
	access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64
	fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fremovexattr
	fsetxattr fstat fstatfs fsync ftruncate futimesat getcwd getdents getdents64 getxattr inotify_add_watch
	inotify_init inotify_init1 inotify_rm_watch ioctl lchown lgetxattr link linkat listxattr llistxattr lremovexattr
	lseek lsetxattr lstat mkdir mkdirat mknod mknodat newfstatat open openat openat2 pread64 preadv preadv2 pwrite64
	pwritev pwritev2 read readahead readlink readlinkat readv removexattr rename renameat renameat2 rmdir sendfile
	setxattr splice stat statfs statx symlink symlinkat sync sync_file_range syncfs tee truncate umask unlink unlinkat
	utime utimensat utimes vmsplice write writev chroot

	accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom recvmmsg recvmsg sendmmsg sendmsg
	sendto setsockopt shutdown socketpair

	fork vfork execve execveat exit exit_group wait4 waitid kill tkill tgkill pidfd_open pidfd_send_signal pidfd_getfd
	ptrace process_vm_readv process_vm_writev kcmp prctl arch_prctl capget capset restart_syscall seccomp
	landlock_create_ruleset landlock_add_rule landlock_restrict_self
	getegid geteuid getgid getgroups getpgid getpgrp getpid getppid getresgid getresuid getsid gettid getuid
	setfsgid setfsuid setgid setgroups setpgid setregid setresgid setresuid setreuid setsid setuid
	getpriority setpriority getrlimit setrlimit prlimit64 getrusage times ioprio_get ioprio_set
	sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler
	sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield getcpu
	rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait
	rt_tgsigqueueinfo sigaltstack rseq membarrier futex futex_waitv get_robust_list set_robust_list set_tid_address

	alarm pause nanosleep clock_getres clock_gettime clock_nanosleep getitimer setitimer gettimeofday time
	timer_create timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime
	epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 pipe pipe2 poll ppoll
	pselect6 select signalfd signalfd4

	brk madvise memfd_create mincore mlock mlock2 mlockall mmap mprotect mremap msync munlock munlockall munmap
	pkey_alloc pkey_free pkey_mprotect get_mempolicy
	shmat shmctl shmdt shmget semctl semget semop semtimedop msgctl msgget msgrcv msgsnd
	mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink
	getrandom sysinfo uname`

const refusedCalls = `
	acct add_key adjtimex bpf clock_adjtime clock_settime delete_module fanotify_init fanotify_mark finit_module
	fsconfig fsmount fsopen fspick init_module io_uring_enter io_uring_register io_uring_setup ioperm iopl kexec_file_load
	kexec_load keyctl mount mount_setattr move_mount move_pages name_to_handle_at nfsservctl open_by_handle_at
	open_tree perf_event_open pivot_root process_madvise quotactl quotactl_fd reboot request_key setdomainname
	sethostname setns settimeofday swapoff swapon syslog umount2 userfaultfd vhangup`
