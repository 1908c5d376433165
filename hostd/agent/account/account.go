// Package account is the ordinary user inside a machine: who shells, terminals
// and files belong to, and the environment its programs start with.
package account

import (
	"os"
	"os/user"
	"strconv"
	"syscall"

	"github.com/berth-dev/berth/shared/agentlink"
)

// Account is a user of the machine.
type Account struct {
	Name   string
	Home   string
	UID    uint32
	GID    uint32
	Groups []uint32 // supplementary
}

// Guest is the machine's ordinary user (agentlink's UserName).
func Guest() Account {
	return Account{
		Name: agentlink.UserName, Home: "/home/" + agentlink.UserName,
		UID: agentlink.UserUID, GID: agentlink.UserGID,
	}
}

// Current is the user this process runs as, for tests without a machine.
func Current() Account {
	a := Account{Name: "user", Home: os.TempDir(), UID: uint32(os.Getuid()), GID: uint32(os.Getgid())}
	if u, err := user.LookupId(strconv.Itoa(os.Getuid())); err == nil {
		a.Name, a.Home = u.Username, u.HomeDir
	}
	return a
}

// Credential is what a child needs to run as the account; nil when this
// process already does, since only root may set ids.
func (a Account) Credential() *syscall.Credential {
	if os.Geteuid() != 0 || a.UID == 0 {
		return nil
	}
	return &syscall.Credential{Uid: a.UID, Gid: a.GID, Groups: a.Groups}
}

// Owns gives a file that root made to the account; nothing to do otherwise.
func (a Account) Owns(chown func(uid, gid int) error) error {
	if a.Credential() == nil {
		return nil
	}
	return chown(int(a.UID), int(a.GID))
}

// Env is the environment the account's programs start with.
func (a Account) Env(term string) []string {
	return []string{
		"HOME=" + a.Home,
		"USER=" + a.Name,
		"LOGNAME=" + a.Name,
		"SHELL=/bin/bash",
		"LANG=C.UTF-8",
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"TERM=" + term,
	}
}
