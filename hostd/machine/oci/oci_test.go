package oci_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/machine/machinetest"
	"github.com/berth-dev/berth/hostd/machine/oci"
)

func TestMain(m *testing.M) {
	machinetest.Main(m, subject, func() error { return goleak.Find() })
}

var subject = machinetest.Subject{New: newDriver}

func newDriver(t testing.TB, home, base, layer string) (machine.Driver, func()) {
	t.Helper()
	d, err := oci.New(oci.Config{Home: home, ImageBase: base, AgentLayer: layer})
	if err != nil {
		t.Fatal(err)
	}
	return d, func() {
		if err := d.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	}
}

func TestSuite(t *testing.T) { machinetest.Run(t, subject) }
